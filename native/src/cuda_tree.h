/* SPDX-License-Identifier: BSD-3-Clause */
/* The GPU's part of a dump and of a restore, as steps over all processes of a tree. Runs in the helper
 * process; knows the driver only as a table of functions, so that tests can put another one there. */
#ifndef KC_CUDA_TREE_H
#define KC_CUDA_TREE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "cuda_driver.h"
#include "result.h"

enum { CUDA_TASKS_MAX = 512, CUDA_GPUS_MAX = 64, CUDA_VISIBLE_MAX = 1024 };

/* Of all processes together: what is said of where device memory came to the host. */
enum { CUDA_RANGES_MAX = 1024 };

/* Seconds for the driver or its management library to start: machines with many GPUs are slow. */
enum { CUDA_START_LIMIT = 90 };

/* Seconds for a call that is under way at the deadline to come to its end. */
enum { CUDA_GRACE = 5 };

/* No CUDA state, or the process has ended. Else one of enum cuda_state. */
enum { CUDA_NONE = -1 };

struct cuda_task {
    pid_t pid;
    unsigned long long starttime;
    bool holds_device; /* it has a file of the GPU's open, perhaps from the process that forked it */
    bool has_thread;   /* it has a thread of the driver's: CUDA state of its own */
    bool parked;       /* it was checkpointed before anything was done */
    bool locked, copied; /* a save has done so with it */
    bool visible_is_cut; /* CUDA_VISIBLE_DEVICES is longer */
    bool shown;        /* its device memory is shown to a helper, which alone can end that */
    bool stored;       /* its device memory is in the folder, not in its own memory */
    int found;         /* its state before anything was done: what it goes back to */
    int64_t memory;    /* bytes of device memory that came to the host, about; -1: not known */
    int64_t expected;  /* bytes of device memory that it has, at most; 0: not known */
    int range_at, range_count; /* where device memory came to, in the list for all; -1: not known */
    char visible[CUDA_VISIBLE_MAX]; /* CUDA_VISIBLE_DEVICES as it was started with; "": not set */
};

struct cuda_gpu {
    struct cuda_uuid uuid;
    char name[96];
    uint64_t memory; /* bytes */
    int64_t free_before, released; /* bytes: before the checkpoint; that it freed; -1: not known */
};

enum cuda_op { CUDA_OP_START, CUDA_OP_LOOK, CUDA_OP_LOCK, CUDA_OP_CHECKPOINT, CUDA_OP_RESTORE,
               CUDA_OP_UNLOCK };

struct cuda_work {
    const struct cuda_driver *driver;
    struct cuda_task *tasks; /* parents before their children */
    size_t *count;
    const struct cuda_gpu_pair *pairs;
    size_t pair_count;
    double lock_timeout; /* seconds for all processes to be locked */
    double copy_timeout; /* seconds that copying one process's memory may take */
    double retry_for;    /* seconds for GPUs without room to get some */
    double deadline;     /* when all that goes forward must be done, by io_now(); 0: never */
    int folder;          /* where device memory is that is stored (cuda_storage.h); 0: nowhere */
    bool store;          /* a checkpoint goes there, not into the processes */
    bool none_parked;    /* nobody has parked one: what is without its device memory has lost it */
    /* Whether the host has room for it after all: where the folder cannot have it. NULL: not known. */
    bool (*host_room)(void *data);
    /* Told before each driver call, which may take `limit` seconds. False: it is not wanted any more. */
    bool (*step)(void *data, enum cuda_op op, pid_t pid, double limit);
    /* Whether the task is the process that it was; NULL: always. */
    bool (*alive)(const struct cuda_task *task);
    /* Told before a process's device memory is copied, and after it came to the host. NULL: not needed. */
    void (*noting)(void *data, struct cuda_task *task, bool after);
    /* Adds tasks that came since. False: it cannot. NULL: none ever come. */
    bool (*more)(void *data, struct kc_result *result);
    /* Told before and after all memory is copied to the host. NULL: not needed. */
    void (*copying)(void *data, bool after);
    /* Whether the GPUs have room for what was copied from them. NULL: not known. */
    bool (*room)(void *data);
    void *data;
};

/* Initialises the driver if a task may have CUDA state, and asks it for every task's state. With
 * `expected` each must be checkpointed or locked. */
bool cuda_tree_look(struct cuda_work *work, bool expected, struct kc_result *result);
/* Whether a task has CUDA state. */
bool cuda_tree_any(const struct cuda_work *work);
/* Lists the GPUs; how many. */
size_t cuda_tree_gpus(const struct cuda_driver *driver, struct cuda_gpu gpus[CUDA_GPUS_MAX]);
/* Locks all, then checkpoints all, and so on with those that began with CUDA meanwhile. When it fails all of
 * it is undone. */
bool cuda_tree_freeze(struct cuda_work *work, double *lock_s, double *copy_s,
                      struct kc_result *result);
/* Checkpoints one that is locked into its own memory: the driver's word. */
int cuda_tree_to_host(const struct cuda_work *work, const struct cuda_task *task);
/* Brings every task back to where it was found, whatever has become of it meanwhile: restores all, then
 * unlocks all. Goes on after a failure, and tells the first one. */
bool cuda_tree_return(struct cuda_work *work, struct kc_result *result);
/* Brings every task that is parked or locked back to running. When one fails all stay parked. */
bool cuda_tree_unpark(struct cuda_work *work, struct kc_result *result);

#endif
