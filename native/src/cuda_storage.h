/* SPDX-License-Identifier: BSD-3-Clause */
/* Device memory that goes into files beside the images, and comes back from there, through two small
 * buffers: a driver that offers custom storage shows it to the process that asks, so that the host's memory
 * need not have room for all of it. */
#ifndef KC_CUDA_STORAGE_H
#define KC_CUDA_STORAGE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "cuda_tree.h"

/* Whether a folder has room for that many bytes, and for what else goes there meanwhile. Never where it lies in
 * the host's memory: what goes there may be more than the host has. */
bool cuda_storage_room(int folder, uint64_t bytes);
/* What the folder has of a process: 1 its device memory, 0 nothing, -1 a list that is not valid. */
int cuda_storage_has(int folder, pid_t pid);
/* Retains the primary context of every GPU, without which the driver shows no memory on it. They stay until this
 * process ends. False where one cannot be had. */
bool cuda_storage_contexts(const struct cuda_driver *driver);

enum cuda_stored {
    CUDA_STORED,
    CUDA_NOT_STORED,   /* the process is as it was: the driver may copy its memory to the host instead */
    CUDA_IN_HOST,      /* the driver has done that */
    CUDA_STORE_FAILED, /* `result` says why; cuda_tree_return() undoes it where that can be */
};

/* Checkpoints a locked process. `task->stored` tells from then on that its memory is in the folder. */
enum cuda_stored cuda_storage_save(struct cuda_work *work, struct cuda_task *task,
                                   struct kc_result *result);
/* Ends the restore of a process, which the driver has begun with `info`. When it fails, the process is
 * not left as one that can be unlocked: it would go on with other data than its own. */
bool cuda_storage_load(struct cuda_work *work, struct cuda_task *task,
                       const struct cuda_storage_info *info, struct kc_result *result);

#endif
