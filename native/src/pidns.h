/* SPDX-License-Identifier: BSD-3-Clause */
/* Restoring into a PID namespace of one's own. */
#ifndef KC_PIDNS_H
#define KC_PIDNS_H

#include <stdbool.h>
#include <sys/types.h>

#include "result.h"

/* Whether this process may make one (tries it in a child). */
bool pidns_possible(void);
/* Makes one. In the inner process (its PID 1, with a /proc of its own) returns true with *exit_code
 * = -1. In the outer process it returns only after the inner one has ended, true with its exit
 * status. False: it could not be done, and all is as before. */
bool pidns_enter(int *exit_code, struct kc_result *result);
/* True in the inner process. */
bool pidns_inside(void);
/* The number that a child of the caller has in the outer namespace; its own where there is none. */
pid_t pidns_outer_pid(pid_t pid);

#endif
