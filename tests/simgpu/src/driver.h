// SPDX-License-Identifier: BSD-3-Clause
// What the parts of the simulated libcuda share: one driver a process.
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "abi.h"
#include "wire.h"

struct CUctx_st {
    int gpu;
    bool primary;
    unsigned int references;
    unsigned int flags;
    struct CUctx_st *next;
};

// Device memory. Its content lies on the machine; `host` holds it while the process is checkpointed.
struct allocation {
    CUdeviceptr address;
    uint64_t size;
    int gpu;
    void *host;
    struct allocation *next;
};

struct driver {
    pthread_mutex_t mutex; // of everything below but the connection
    pthread_cond_t changed;
    bool initialised;
    bool forked;           // a child of fork: the real driver does not work there either
    bool closing;          // a lock is being taken: new calls wait, those within end
    unsigned int active;   // calls that are within the driver
    CUprocessState state;
    char folder[SIM_FOLDER];
    struct sim_machine machine;
    struct sim_connection connection;
    int visible[SIM_MAX_GPUS]; // by CUDA_VISIBLE_DEVICES: ordinal -> index in machine.gpus
    int visible_count;
    struct CUctx_st primary[SIM_MAX_GPUS]; // by ordinal
    struct CUctx_st *contexts;             // all others
    struct allocation *allocations;
    CUdeviceptr next_address;
    bool managed, ipc; // the process has used unified memory, CUDA IPC
    bool broken;       // a restore ran out of memory: this driver cannot restore any more
};

extern struct driver driver;

// Every function of the interface begins with ENTER, which waits while the process is locked, and
// ends with LEAVE. CALL is for those that a locked process can use.
CUresult gate_enter(const char *function);
CUresult gate_leave(CUresult result);
CUresult gate_call(const char *function);
#define ENTER                                     \
    do {                                          \
        CUresult entered_ = gate_enter(__func__); \
        if (entered_ != CUDA_SUCCESS)             \
            return entered_;                      \
    } while (0)
#define LEAVE(result) return gate_leave(result)

// Wait until what was launched has ended; `deadline_ns` is of CLOCK_MONOTONIC, 0 for none.
CUresult wait_for_work(uint64_t deadline_ns);
uint64_t now_ns(void);
void sleep_until(uint64_t deadline_ns);

// One request to the machine about a GPU (index in machine.gpus, or -1).
CUresult device_call(enum sim_op op, int gpu, uint64_t a, uint64_t b, uint64_t c);
CUresult device_send(enum sim_op op, int gpu, uint64_t a, uint64_t b, const void *data,
                     uint64_t length);
CUresult device_receive(enum sim_op op, int gpu, uint64_t a, uint64_t b, void *out, size_t size,
                        uint64_t *value);

// The context that is current in this thread, or NULL.
CUcontext current_context(void);
// A new stream of a GPU's primary context, or NULL where it is not retained. With driver.mutex held.
CUstream stream_of_gpu(int gpu);
// The allocation that holds the whole range, or NULL. With driver.mutex held.
struct allocation *find_allocation(CUdeviceptr address, uint64_t size);
// Fresh addresses for that many bytes.
CUdeviceptr take_addresses(uint64_t size);

// rendezvous.c: starts the thread that carries out what other processes ask for.
CUresult start_driver_thread(void);
void forget_driver_thread(void);
// device.c
CUresult connect_devices(void);
// checkpoint.c: carried out by the driver thread of the process that is locked, checkpointed, ...
struct command;
CUresult carry_out(const struct command *command, uint64_t *value);

// What the driver of this process is called with: the functions' version, base name first.
struct symbol {
    const char *name;
    int since;
    void (*function)(void);
};
