/* SPDX-License-Identifier: BSD-3-Clause */
/* Keeps the main thread of a restored kernel from running while its other threads do. */
#ifndef KC_HOLD_H
#define KC_HOLD_H

#include <stdbool.h>
#include <sys/types.h>

#include "result.h"

/* The process must be a stopped child of the caller. */
bool hold_begin(pid_t pid, struct kc_result *result);
/* Signals that came meanwhile are pending and are delivered now. */
void hold_end(pid_t pid);

#endif
