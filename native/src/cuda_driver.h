/* SPDX-License-Identifier: BSD-3-Clause */
/* The NVIDIA driver's library, found at run time. Only the helper process (cuda_helper.c) loads it. */
#ifndef KC_CUDA_DRIVER_H
#define KC_CUDA_DRIVER_H

#include <stdbool.h>

#include "cuda_abi.h"
#include "cuda_nvml.h"
#include "result.h"

struct cuda_driver {
    int version; /* of the CUDA interface: 12080 is 12.8 */
    bool custom_storage;
    int (*init)(unsigned flags);
    int (*get_error_name)(int error, const char **text);
    int (*get_error_string)(int error, const char **text);
    int (*device_get_count)(int *count);
    int (*device_get)(int *device, int ordinal);
    int (*device_get_uuid)(struct cuda_uuid *uuid, int device);
    int (*device_get_name)(char *name, int length, int device);
    int (*device_total_mem)(size_t *bytes, int device);
    int (*get_state)(int pid, int *state);
    int (*lock)(int pid, struct cuda_lock_args *args);
    int (*checkpoint)(int pid, struct cuda_checkpoint_args *args);
    int (*restore)(int pid, struct cuda_restore_args *args);
    int (*unlock)(int pid, struct cuda_unlock_args *args);
    /* Of custom storage; not to be called without. */
    int (*complete)(void *operation);
    int (*retain_context)(void **context, int device);
    int (*stream_context)(void *stream, void **context);
    int (*set_context)(void *context);
    int (*context_device)(int *device);
    int (*to_host)(void *to, uint64_t from, size_t size, void *stream);
    int (*to_device)(uint64_t to, const void *from, size_t size, void *stream);
    int (*wait_stream)(void *stream);
    int (*pin)(void *memory, size_t size, unsigned flags);
    void (*bind_nvml)(struct cuda_nvml *nvml); /* loads the management library; NULL: not here */
};

/* CUDA_TOO_OLD: `version` is set, the functions that save are not there. */
enum cuda_load { CUDA_LOADED, CUDA_NO_LIBRARY, CUDA_TOO_OLD };

/* Loads the library by its fixed name, or (in containers of some clouds) from its fixed place, never
 * from a path of the caller's. */
enum cuda_load cuda_driver_load(struct cuda_driver *driver);
/* For tests: the file at that path. */
enum cuda_load cuda_driver_load_file(const char *path, struct cuda_driver *driver);
/* "CUDA_ERROR_NOT_READY (device not ready)" */
void cuda_error_words(const struct cuda_driver *driver, int error, char *text, size_t capacity);

/* GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx */
enum { CUDA_UUID_TEXT = 41 };
/* Parses a UUID that ends at `end` or at the end of the text. */
bool cuda_parse_uuid(const char *text, char end, struct cuda_uuid *uuid);
void cuda_format_uuid(const struct cuda_uuid *uuid, char text[CUDA_UUID_TEXT]);

#endif
