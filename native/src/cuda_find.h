/* SPDX-License-Identifier: BSD-3-Clause */
/* Which processes use the driver, by what /proc says of them. */
#ifndef KC_CUDA_FIND_H
#define KC_CUDA_FIND_H

#include <stdbool.h>
#include <sys/types.h>

#include "cuda_tree.h"

/* Whether a process has the driver's library mapped. */
bool cuda_maps_driver(pid_t pid);
/* A task with what /proc says of it; false when it has ended. */
bool cuda_describe(pid_t pid, struct cuda_task *task);
/* Adds those of the tree below `root`, and itself, that have the library mapped and are not there yet;
 * how many. */
size_t cuda_find(pid_t root, struct cuda_task tasks[CUDA_TASKS_MAX], size_t *count);

#endif
