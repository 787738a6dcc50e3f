/* SPDX-License-Identifier: BSD-3-Clause */
/* The part of the NVIDIA driver's binary interface that is used here, declared anew so that nothing of
 * NVIDIA's is needed to build this. Layouts and values are those of CUDA 12.8 to 13.5. */
#ifndef KC_CUDA_ABI_H
#define KC_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

enum cuda_result {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_NOT_SUPPORTED = 801,
};

enum cuda_state {
    CUDA_RUNNING = 0,
    CUDA_LOCKED = 1,
    CUDA_CHECKPOINTED = 2,
    CUDA_FAILED = 3,
    CUDA_CHECKPOINTING = 4,
    CUDA_RESTORING = 5,
};

struct cuda_uuid {
    unsigned char bytes[16];
};

struct cuda_lock_args {
    unsigned timeout_ms; /* 0: no timeout */
    unsigned reserved0;
    uint64_t reserved1[7];
};

/* Device memory of another process, of one GPU, as this process sees it until the operation is complete. */
struct cuda_storage_part {
    uint64_t address;
    size_t size; /* bytes */
    void *stream; /* of the primary context of that GPU */
};

struct cuda_storage_info {
    void *operation;
    struct cuda_storage_part *parts;
    unsigned count;
};

struct cuda_checkpoint_args {
    struct cuda_storage_info **custom_storage; /* since 13.4 */
    char reserved[56];
};

struct cuda_gpu_pair {
    struct cuda_uuid from, to;
};

/* Not of the driver: what a GPU must have free. */
struct cuda_gpu_need {
    struct cuda_uuid uuid;
    uint64_t bytes;
};

struct cuda_restore_args {
    struct cuda_gpu_pair *pairs; /* since 13.0; every checkpointed GPU, when there are any */
    unsigned pair_count;
    unsigned padding;
    struct cuda_storage_info **custom_storage; /* since 13.4 */
    char reserved[40];
};

struct cuda_unlock_args {
    uint64_t reserved[8];
};

enum {
    CUDA_CHECKPOINT_SINCE = 12080,
    CUDA_PAIRS_SINCE = 13000,
    CUDA_CUSTOM_STORAGE_SINCE = 13040,
};

_Static_assert(sizeof(struct cuda_lock_args) == 64 && sizeof(struct cuda_checkpoint_args) == 64 &&
                   sizeof(struct cuda_restore_args) == 64 && sizeof(struct cuda_unlock_args) == 64,
               "the driver's argument blocks have 64 bytes");
_Static_assert(sizeof(struct cuda_gpu_pair) == 32 &&
                   offsetof(struct cuda_restore_args, pair_count) == 8 &&
                   offsetof(struct cuda_restore_args, custom_storage) == 16 &&
                   offsetof(struct cuda_lock_args, reserved1) == 8,
               "the driver's argument blocks are laid out so");

#endif
