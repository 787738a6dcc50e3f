/* SPDX-License-Identifier: BSD-3-Clause */
/* What the driver says of the processes of a tree, and of the GPUs. (cuda_tree.h has what others ask.) */
#ifndef KC_CUDA_LOOK_H
#define KC_CUDA_LOOK_H

#include <stdbool.h>

#include "cuda_tree.h"

/* The driver's word on a task, and its error. CUDA_NONE: it has no CUDA state, has ended, or that is not told. */
int cuda_state_of(const struct cuda_work *work, const struct cuda_task *task, int *state);
/* Whoever came, or began with CUDA, since all were looked at. `found`: one with which something is to be
 * done. */
bool cuda_look_for_new(struct cuda_work *work, bool *found, struct kc_result *result);
/* False. Says in words what the driver did not do. */
bool cuda_fail(struct kc_result *result, const struct cuda_work *work, enum kc_reason reason, int error,
               const struct cuda_task *task, const char *what);

#endif
