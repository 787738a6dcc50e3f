/* SPDX-License-Identifier: BSD-3-Clause */
/* PID namespaces: making one to restore into, and joining the one that a kernel was restored into. */
#ifndef KC_PIDNS_H
#define KC_PIDNS_H

#include <stdbool.h>
#include <sys/types.h>

#include "result.h"

/* Whether this process may make one (tries it in a child). */
bool pidns_possible(void);

/* Makes one. It returns true in the inner process, its PID 1, with a /proc of its own and *exit_code
 * = -1. In the outer process it relays signals and returns true only after the inner one has ended,
 * with its exit status. False: it could not be done. Call it before any signal is blocked. */
bool pidns_enter(int *exit_code, struct kc_result *result);

/* The same for the PID and mount namespaces of the process behind `pidfd`. `*pid` becomes its
 * number there. Namespaces that an unprivileged user could have arranged are refused, since programs
 * of this name space are run with rights. */
bool pidns_join(int pidfd, pid_t *pid, int *exit_code, struct kc_result *result);

/* True in the inner process of pidns_enter(). */
bool pidns_inside(void);
/* The number that a child of the caller has in the outer namespace; its own where there is none. */
pid_t pidns_outer_pid(pid_t pid);

#endif
