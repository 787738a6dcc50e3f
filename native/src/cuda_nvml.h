/* SPDX-License-Identifier: BSD-3-Clause */
/* NVIDIA's management library, where there is one: what the driver's own does not tell beforehand. */
#ifndef KC_CUDA_NVML_H
#define KC_CUDA_NVML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "cuda_abi.h"

struct cuda_nvml_device; /* the library's */
struct cuda_nvml_process {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
};
struct cuda_nvml_memory {
    unsigned long long total, free, used;
};

struct cuda_nvml {
    bool loaded; /* else none of the functions is there */
    int (*init)(void);
    int (*driver_version)(char *version, unsigned length);
    int (*device_by_uuid)(const char *uuid, struct cuda_nvml_device **device);
    int (*memory)(struct cuda_nvml_device *device, struct cuda_nvml_memory *memory);
    int (*mig_mode)(struct cuda_nvml_device *device, unsigned *current, unsigned *pending);
    int (*processes)(struct cuda_nvml_device *device, unsigned *count,
                     struct cuda_nvml_process *processes);
    int (*mps_processes)(struct cuda_nvml_device *device, unsigned *count,
                         struct cuda_nvml_process *processes);
};

/* Takes the functions from a loaded library (NULL: there is none), and starts it. */
void cuda_nvml_bind(void *library, struct cuda_nvml *nvml);
/* The driver's version, "580.95.05"; "" where it is not known. */
void cuda_nvml_driver_version(const struct cuda_nvml *nvml, char *version, unsigned length);
/* Bytes of a GPU's memory that are free; -1 where that is not known. */
int64_t cuda_nvml_free_memory(const struct cuda_nvml *nvml, const struct cuda_uuid *gpu);
/* Whether a GPU is in MIG mode; whether that process is on it; whether it is on it through MPS. */
bool cuda_nvml_mig(const struct cuda_nvml *nvml, const struct cuda_uuid *gpu);
bool cuda_nvml_is_on(const struct cuda_nvml *nvml, const struct cuda_uuid *gpu, pid_t pid);
/* Bytes that a process has on a GPU; 0 where that is not known, as in most containers. */
int64_t cuda_nvml_used_by(const struct cuda_nvml *nvml, const struct cuda_uuid *gpu, pid_t pid);
bool cuda_nvml_is_on_by_mps(const struct cuda_nvml *nvml, const struct cuda_uuid *gpu, pid_t pid);

#endif
