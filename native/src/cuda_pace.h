/* SPDX-License-Identifier: BSD-3-Clause */
/* How long a step over a tree may take, and whether it is still wanted. */
#ifndef KC_CUDA_PACE_H
#define KC_CUDA_PACE_H

#include <stdbool.h>
#include <sys/types.h>

#include "cuda_tree.h"

enum { CUDA_RETRY_MS = 100 }; /* between two tries */

/* Seconds that a call may take which copies no memory. */
double cuda_short_call(const struct cuda_work *work);
/* What a call that goes forward may take: none of them goes beyond the deadline for all, but for a grace. */
double cuda_forward(const struct cuda_work *work, double most);
/* Tells that a step begins, or goes on. False: it is not wanted any more. */
bool cuda_step(struct cuda_work *work, enum cuda_op op, pid_t pid, double limit);
/* Whether the deadline for all that goes forward has passed. */
bool cuda_late(const struct cuda_work *work);
/* False; say why. */
bool cuda_too_late(struct kc_result *result);
bool cuda_cancelled(struct kc_result *result);
/* Asked before each call that changes something, too: a number may be another process's by then. */
bool cuda_alive(const struct cuda_work *work, const struct cuda_task *task);

#endif
