// SPDX-License-Identifier: BSD-3-Clause
// How a process speaks to the machine that holds its device memory (machine.py).
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SIM_MAX_GPUS 16
#define SIM_FOLDER 1024

enum sim_op {
    SIM_HELLO = 1,
    SIM_CONTEXT = 2,
    SIM_ALLOC = 3,
    SIM_FREE = 4,
    SIM_WRITE = 5,
    SIM_READ = 6,
    SIM_COPY = 7,
    SIM_SET = 8,
    SIM_LAUNCH = 9,
    SIM_REMAINING = 10,
    SIM_MEMORY = 11,
    SIM_PROCESSES = 12,
    SIM_EVENTS = 13,
    SIM_SHARE = 15,
    SIM_MAP = 16,
    SIM_RELEASE = 17,
};

// What machines can do and fail to do (SIM_HELLO).
enum sim_flags {
    SIM_STICKY_OOM = 1,
    SIM_IPC_CHECKPOINT = 2,
    SIM_MANAGED_CHECKPOINT = 4,
    SIM_CHILDREN_KEEP_DEVICES = 8,
};

struct sim_gpu {
    uint8_t uuid[16];
    char name[64];
    char chip[32];
    uint64_t total;
    uint32_t mig;
    uint32_t persistence;
    uint32_t cc_major;
    uint32_t cc_minor;
    uint32_t pci_bus;
    uint32_t lost;
    uint32_t mps;
    uint32_t nvlinks;
};

struct sim_machine {
    uint32_t cuda_version;
    uint32_t gpu_count;
    uint32_t flags;
    uint32_t reserved;
    char driver[32];
    struct sim_gpu gpus[SIM_MAX_GPUS];
};

struct sim_request {
    uint32_t op;
    uint32_t flags;
    uint8_t uuid[16];
    uint64_t a, b, c;
    uint64_t length;
};

struct sim_reply {
    int32_t status;
    uint32_t reserved;
    uint64_t value;
    uint64_t length;
};

struct sim_connection {
    int fd;
    pthread_mutex_t mutex;
};

// The folder of this process's machine: $SIMGPU_MACHINE, else /run/simgpu.
void sim_machine_folder(char folder[SIM_FOLDER]);

// The socket that stands for a device file; -1 with errno.
int sim_connect(const char *folder);

// One request and its answer; the status is a CUresult, a broken connection CUDA_ERROR_UNKNOWN.
int sim_call(struct sim_connection *connection, struct sim_request request, const void *payload,
             void *out, size_t out_size, uint64_t *value);

// What the machine is, over a connection of its own. False where there is none.
bool sim_describe(const char *folder, struct sim_machine *machine);
