/* SPDX-License-Identifier: BSD-3-Clause */
/* The process that calls the NVIDIA driver: its calls cannot be interrupted and may hang, so that they are
 * made where they can be left behind. It has no right that the caller has not, and an empty environment. */
#ifndef KC_CUDA_HELPER_H
#define KC_CUDA_HELPER_H

#include <stdbool.h>
#include <sys/types.h>

#include "cuda_maps.h"
#include "cuda_tree.h"

enum cuda_mode {
    CUDA_PROBE,   /* only loads the driver */
    CUDA_DUMP,    /* finds the tasks itself; undoes everything should this program be killed */
    CUDA_UNPARK,  /* finds the tasks itself */
    CUDA_RESTORE, /* the tasks are given */
    CUDA_REPAIR,  /* the tasks are those of a helper that was left behind */
};

/* What is asked of it, one letter each. */
enum { CUDA_GO = 'g', CUDA_THAW = 't', CUDA_CANCEL = 'c', CUDA_QUIT = 'q' };

/* Memory that both have. This program sends no signal to anything that it read there. */
struct cuda_shared {
    enum cuda_mode mode;
    pid_t root;
    double lock_timeout, copy_timeout, retry_for, deadline; /* see struct cuda_work */
    int folder; /* of this program, for device memory; 0: none */
    bool none_parked; /* see struct cuda_work */
    struct cuda_gpu_pair pairs[CUDA_GPUS_MAX];
    size_t pair_count;
    struct cuda_gpu_need needs[CUDA_GPUS_MAX]; /* of an unpark */
    size_t need_count;
    struct cuda_task tasks[CUDA_TASKS_MAX];
    size_t count;
    /* What the helper found. */
    struct cuda_range ranges[CUDA_RANGES_MAX];
    size_t range_count;
    struct kc_result result;
    enum cuda_load loaded;
    int version;
    char driver_version[80]; /* "": not known */
    bool custom_storage;
    struct cuda_gpu gpus[CUDA_GPUS_MAX];
    size_t gpu_count;
    double lock_s, copy_s, return_s;
};

struct cuda_message {
    bool done;
    enum cuda_op op;
    pid_t pid;
    double limit; /* seconds until the next message comes at the latest */
};

/* Forks it. `load` is what it loads the driver with. Returns its PID, and a socket in *in; or -1. */
pid_t cuda_helper_start(struct cuda_shared *shared, enum cuda_load (*load)(struct cuda_driver *),
                        int *in);

#endif
