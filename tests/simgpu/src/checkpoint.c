// SPDX-License-Identifier: BSD-3-Clause
// What the driver thread does with its process when another one asks for it.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "rendezvous.h"

static void set_state(CUprocessState state)
{
    pthread_mutex_lock(&driver.mutex);
    driver.state = state;
    control.state = (int32_t)state;
    pthread_cond_broadcast(&driver.changed);
    pthread_mutex_unlock(&driver.mutex);
}

static void close_devices(void)
{
    if (driver.connection.fd >= 0) {
        device_call(SIM_RELEASE, -1, 0, 0, 0); // a child of fork may have the socket open as well
        close(driver.connection.fd);
    }
    driver.connection.fd = -1;
}

// New calls wait from here on; those that are within the driver, and the work, come to their end.
static CUresult lock_process(uint32_t timeout_ms)
{
    if (driver.state != CU_PROCESS_STATE_RUNNING)
        return CUDA_ERROR_ILLEGAL_STATE;
    uint64_t deadline = timeout_ms ? now_ns() + timeout_ms * 1000000ULL : 0;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&driver.mutex);
    driver.closing = true;
    while (driver.active > 0 && result == CUDA_SUCCESS) {
        struct timespec until = {(time_t)(deadline / 1000000000ULL),
                                 (long)(deadline % 1000000000ULL)};
        if (!deadline)
            pthread_cond_wait(&driver.changed, &driver.mutex);
        else if (pthread_cond_clockwait(&driver.changed, &driver.mutex, CLOCK_MONOTONIC,
                                        &until) != 0 &&
                 driver.active > 0)
            result = CUDA_ERROR_NOT_READY;
    }
    pthread_mutex_unlock(&driver.mutex);
    if (result == CUDA_SUCCESS)
        result = wait_for_work(deadline);
    driver.closing = false;
    set_state(result == CUDA_SUCCESS ? CU_PROCESS_STATE_LOCKED : CU_PROCESS_STATE_RUNNING);
    return result;
}

static void drop_copies(void)
{
    for (struct allocation *one = driver.allocations; one; one = one->next) {
        if (one->host)
            munmap(one->host, one->size);
        one->host = NULL;
    }
}

// Device memory becomes memory of this process.
static CUresult copy_out(void)
{
    for (struct allocation *one = driver.allocations; one; one = one->next) {
        void *host = mmap(NULL, one->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                          -1, 0);
        if (host == MAP_FAILED)
            return CUDA_ERROR_OUT_OF_MEMORY;
        one->host = host;
        CUresult result = device_receive(SIM_READ, one->gpu, one->address, one->size, host,
                                         one->size, NULL);
        if (result != CUDA_SUCCESS)
            return result;
    }
    return CUDA_SUCCESS;
}

static bool uses_partition(void)
{
    bool found = false;
    for (int i = 0; i < driver.visible_count; i++)
        found |= driver.primary[i].references > 0 && driver.machine.gpus[driver.visible[i]].mig;
    for (struct CUctx_st *one = driver.contexts; one; one = one->next)
        found |= driver.machine.gpus[one->gpu].mig;
    return found;
}

// Whether whoever is to see the memory has contexts on all GPUs that this process uses, or will.
static bool can_see(const struct command *command, const int map[SIM_MAX_GPUS])
{
    uint64_t used = 0;
    for (int i = 0; i < driver.visible_count; i++)
        if (driver.primary[i].references > 0)
            used |= 1ULL << map[driver.primary[i].gpu];
    for (struct CUctx_st *one = driver.contexts; one; one = one->next)
        used |= 1ULL << map[one->gpu];
    return (used & ~command->contexts) == 0;
}

static CUresult checkpoint_process(const struct command *command)
{
    uint64_t token = command->token;
    int same[SIM_MAX_GPUS];
    for (int i = 0; i < SIM_MAX_GPUS; i++)
        same[i] = i;
    if (driver.state != CU_PROCESS_STATE_LOCKED)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (uses_partition() ||
        (driver.managed && !(driver.machine.flags & SIM_MANAGED_CHECKPOINT)) ||
        (driver.ipc && !(driver.machine.flags & SIM_IPC_CHECKPOINT)))
        return CUDA_ERROR_NOT_SUPPORTED;
    if (token && !can_see(command, same))
        return CUDA_ERROR_INVALID_CONTEXT;
    CUresult result = token ? device_call(SIM_SHARE, -1, token, 0, 0) : copy_out();
    if (result != CUDA_SUCCESS) {
        drop_copies();
        return result;
    }
    if (token) {
        set_state(CU_PROCESS_STATE_CHECKPOINTING);
    } else {
        close_devices();
        set_state(CU_PROCESS_STATE_CHECKPOINTED);
    }
    return CUDA_SUCCESS;
}

static int index_of(const struct sim_machine *machine, const void *uuid)
{
    for (uint32_t i = 0; i < machine->gpu_count; i++)
        if (memcmp(machine->gpus[i].uuid, uuid, 16) == 0)
            return (int)i;
    return -1;
}

// Which GPU of the new machine stands for each of the old one: as the caller says, or by index.
static CUresult map_gpus(const struct command *command, const struct sim_machine *old,
                         const struct sim_machine *new, int map[SIM_MAX_GPUS])
{
    bool taken[SIM_MAX_GPUS] = {false};
    for (uint32_t i = 0; i < old->gpu_count; i++) {
        map[i] = command->pair_count ? -1 : (int)i;
        for (uint32_t k = 0; k < command->pair_count; k++)
            if (memcmp(&command->pairs[k].oldUuid, old->gpus[i].uuid, 16) == 0)
                map[i] = index_of(new, &command->pairs[k].newUuid);
        if (map[i] < 0 || map[i] >= (int)new->gpu_count || taken[map[i]])
            return CUDA_ERROR_INVALID_VALUE;
        taken[map[i]] = true;
        if (strcmp(old->gpus[i].chip, new->gpus[map[i]].chip) != 0)
            return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

// All contexts and all memory, at the addresses that they had, on the GPUs that `map` names.
static CUresult acquire(const int map[SIM_MAX_GPUS])
{
    CUresult result = CUDA_SUCCESS;
    for (int i = 0; i < driver.visible_count && result == CUDA_SUCCESS; i++)
        if (driver.primary[i].references > 0)
            result = device_call(SIM_CONTEXT, map[driver.primary[i].gpu], 1, 0, 0);
    for (struct CUctx_st *one = driver.contexts; one && result == CUDA_SUCCESS; one = one->next)
        result = device_call(SIM_CONTEXT, map[one->gpu], 1, 0, 0);
    for (struct allocation *one = driver.allocations; one && result == CUDA_SUCCESS;
         one = one->next) {
        result = device_call(SIM_ALLOC, map[one->gpu], one->address, one->size, 0);
        if (result == CUDA_SUCCESS && one->host)
            result = device_send(SIM_WRITE, map[one->gpu], one->address, 0, one->host, one->size);
    }
    return result;
}

static void adopt(const int map[SIM_MAX_GPUS])
{
    for (int i = 0; i < driver.visible_count; i++) {
        driver.visible[i] = map[driver.visible[i]];
        driver.primary[i].gpu = driver.visible[i];
    }
    for (struct CUctx_st *one = driver.contexts; one; one = one->next)
        one->gpu = map[one->gpu];
    for (struct allocation *one = driver.allocations; one; one = one->next)
        one->gpu = map[one->gpu];
}

static bool stored_elsewhere(void)
{
    for (struct allocation *one = driver.allocations; one; one = one->next)
        if (!one->host)
            return true;
    return false;
}

static CUresult restore_process(const struct command *command)
{
    if (driver.state != CU_PROCESS_STATE_CHECKPOINTED)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (driver.broken)
        return CUDA_ERROR_OPERATING_SYSTEM;
    if (stored_elsewhere() && !command->token)
        return CUDA_ERROR_INVALID_VALUE;
    // The process has the library of the driver with it, and no other driver works with that.
    static struct sim_machine old;
    old = driver.machine;
    char folder[SIM_FOLDER];
    memcpy(folder, driver.folder, sizeof(folder));
    memcpy(driver.folder, command->folder, sizeof(driver.folder));
    int map[SIM_MAX_GPUS];
    CUresult result = connect_devices();
    if (result == CUDA_SUCCESS && strcmp(old.driver, driver.machine.driver) != 0)
        result = CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
    if (result == CUDA_SUCCESS)
        result = map_gpus(command, &old, &driver.machine, map);
    if (result == CUDA_SUCCESS && command->token && !can_see(command, map))
        result = CUDA_ERROR_INVALID_CONTEXT;
    if (result == CUDA_SUCCESS) {
        result = acquire(map);
        if (result == CUDA_ERROR_OUT_OF_MEMORY && driver.machine.flags & SIM_STICKY_OOM)
            driver.broken = true;
    }
    if (result == CUDA_SUCCESS && command->token)
        result = device_call(SIM_SHARE, -1, command->token, 0, 0);
    if (result != CUDA_SUCCESS) {
        close_devices();
        driver.machine = old;
        memcpy(driver.folder, folder, sizeof(driver.folder));
        return result;
    }
    adopt(map);
    drop_copies();
    set_state(command->token ? CU_PROCESS_STATE_RESTORING : CU_PROCESS_STATE_LOCKED);
    return CUDA_SUCCESS;
}

// The caller has copied the device memory away from, or onto, this process's GPUs.
static CUresult complete(void)
{
    if (driver.state == CU_PROCESS_STATE_CHECKPOINTING) {
        close_devices();
        set_state(CU_PROCESS_STATE_CHECKPOINTED);
    } else if (driver.state == CU_PROCESS_STATE_RESTORING) {
        set_state(CU_PROCESS_STATE_LOCKED);
    } else {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    return CUDA_SUCCESS;
}

CUresult carry_out(const struct command *command, uint64_t *value)
{
    *value = 0;
    switch (command->op) {
    case COMMAND_LOCK:
        return lock_process(command->timeout_ms);
    case COMMAND_CHECKPOINT:
        return checkpoint_process(command);
    case COMMAND_RESTORE:
        return restore_process(command);
    case COMMAND_UNLOCK:
        if (driver.state != CU_PROCESS_STATE_LOCKED)
            return CUDA_ERROR_ILLEGAL_STATE;
        set_state(CU_PROCESS_STATE_RUNNING);
        return CUDA_SUCCESS;
    case COMMAND_COMPLETE:
        return complete();
    case COMMAND_FAIL:
        close_devices();
        drop_copies();
        set_state(CU_PROCESS_STATE_FAILED);
        return CUDA_ERROR_UNKNOWN;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}
