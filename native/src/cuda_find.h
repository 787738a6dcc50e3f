/* SPDX-License-Identifier: BSD-3-Clause */
/* Which processes use the driver, by what /proc says of them. */
#ifndef KC_CUDA_FIND_H
#define KC_CUDA_FIND_H

#include <stdbool.h>
#include <sys/types.h>

#include "cuda_tree.h"

/* What /proc says: nothing, when the process has ended; and what it does not let be seen is not taken for
 * a no. */
enum cuda_seen { CUDA_SEEN_NO, CUDA_SEEN_YES, CUDA_SEEN_UNKNOWN /* see errno */ };

/* Whether a process has the driver's library mapped. */
enum cuda_seen cuda_maps_driver(pid_t pid);
/* A task with what /proc says of it; CUDA_SEEN_NO when it has ended. */
enum cuda_seen cuda_describe(pid_t pid, struct cuda_task *task);
/* Says that it cannot be told of the process, by errno. */
bool cuda_unknown(pid_t pid, struct kc_result *result);
/* Adds those of the tree below `root`, and itself, that have the library mapped and are not there yet. Those
 * without CUDA state that are there are described anew. False when there are too many, or it cannot be told. */
bool cuda_find(pid_t root, struct cuda_task tasks[CUDA_TASKS_MAX], size_t *count,
               struct kc_result *result);

#endif
