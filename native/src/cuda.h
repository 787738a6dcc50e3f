/* SPDX-License-Identifier: BSD-3-Clause */
/* What a dump, a restore and `probe` do about the GPU. Nothing of it happens, and no driver is loaded, for
 * a tree in which no process has the driver's library mapped. */
#ifndef KC_CUDA_H
#define KC_CUDA_H

#include <stdbool.h>
#include <sys/types.h>

#include "args.h"
#include "cuda_helper.h"
#include "json.h"
#include "result.h"
#include "tree.h"

/* Waits for `fd` at most that many ms. False: what is being done is not wanted any more. */
typedef bool (*cuda_wait)(void *data, int fd, int most);

struct cuda {
    struct cuda_shared *shared; /* NULL: no GPU in this */
    enum cuda_load (*load)(struct cuda_driver *); /* NULL: the node's driver; tests have another */
    int folder; /* for device memory that need not come to the host (cuda_storage.h); 0: none */
    pid_t helper; /* -1: there is none */
    int socket;
    cuda_wait wait;
    void *data;
    double deadline;   /* of all that goes forward, by io_now() */
    double undo_limit; /* seconds for all that gives back or undoes, however many processes there are */
    double blocked_at, blocked_s; /* how long the kernel's calls of CUDA had to wait */
    struct kc_result problem;     /* a dump that is whole, after which the GPU did not come back */
};

/* Prepares for a dump of the tree, into `folder` if that is set. Leaves `shared` NULL where no process of it uses the driver. */
bool cuda_begin(struct cuda *cuda, const struct tree *tree, const struct args *args, cuda_wait wait,
                void *data, struct kc_result *result);
/* Halts the GPU's work of all processes, and has the driver copy its memory to theirs. When it fails it is
 * undone. Afterwards `shared` is NULL if no process had CUDA state after all. */
bool cuda_freeze(struct cuda *cuda, struct kc_result *result);
/* Gives the GPU back to the processes, which run. What fails is in `problem`. */
void cuda_thaw(struct cuda *cuda);
/* Nothing more is to be done, because the processes were killed. */
void cuda_end(struct cuda *cuda);
/* Nothing more is to be done: the processes stay without their GPU. */
void cuda_leave(struct cuda *cuda);
/* The opposite, in one step: all processes get their GPU, or all stay without. As for cuda_freeze() `shared`
 * is NULL afterwards if no process had CUDA state. */
bool cuda_unpark(struct cuda *cuda, struct kc_result *result);
/* The value `gpu` of the event `done`. */
void cuda_record(const struct cuda *cuda, struct json *json);

/* The PIDs of tasks with CUDA state are in a file beside the images. */
bool cuda_write_tasks(const struct cuda *cuda, int images);
/* How many there are, 0 without such a file, -1 when it is not valid. */
ssize_t cuda_read_tasks(int images, pid_t pids[CUDA_TASKS_MAX]);
/* Gives the GPU back to the restored processes, which run (but for a held main thread). */
bool cuda_restore(const pid_t *pids, size_t count, const struct args *args, int images, cuda_wait wait,
                  void *data, struct kc_result *result);

/* The value `gpu` of `probe`; true when kernels with CUDA state can be saved, and a word about why not. */
bool cuda_probe(struct json *json, struct kc_result *result);

#endif
