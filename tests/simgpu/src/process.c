// SPDX-License-Identifier: BSD-3-Clause
// The functions with which one process locks, checkpoints, restores and unlocks another.
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "faults.h"
#include "rendezvous.h"

struct CUcheckpointOperation_st {
    CUcheckpointCustomStorageInfo info; // first: it is what the caller gets a pointer to
    CUcheckpointCustomStoragePerDeviceData devices[SIM_MAX_GPUS];
    int pid;
    CUcheckpointOperationHandle next;
};

// Those that are not complete. With driver.mutex.
static CUcheckpointOperationHandle operations;

enum { GPU_PAIRS_SINCE = 13000, CUSTOM_STORAGE_SINCE = 13040, CHECKPOINT_SINCE = 12080 };

static bool zero(const void *data, size_t size)
{
    const char *at = data;
    for (size_t i = 0; i < size; i++)
        if (at[i])
            return false;
    return true;
}

static bool own_machine(struct sim_machine *machine)
{
    char folder[SIM_FOLDER];
    sim_machine_folder(folder);
    return sim_describe(folder, machine);
}

// What every function looks at first: the faults, and whether this driver has the function.
static CUresult begin(const char *function, int pid, struct sim_machine *machine)
{
    int fault = sim_fault(function);
    if (fault > 0)
        return (CUresult)fault;
    if (!own_machine(machine))
        return CUDA_ERROR_NO_DEVICE;
    if ((int)machine->cuda_version < CHECKPOINT_SINCE)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (fault == SIM_FAULT_FAIL) {
        struct command command = {.op = COMMAND_FAIL};
        return send_command(pid, &command, NULL);
    }
    return CUDA_SUCCESS;
}

static CUresult end(CUresult result)
{
    return (CUresult)sim_fault_after((int)result);
}

API CUresult cuCheckpointProcessGetState(int pid, CUprocessState *state)
{
    struct sim_machine machine;
    CUresult result = begin(__func__, pid, &machine);
    if (result != CUDA_SUCCESS)
        return result;
    struct control other;
    if (!state)
        return CUDA_ERROR_INVALID_VALUE;
    result = read_control(pid, &other);
    if (result == CUDA_SUCCESS)
        *state = (CUprocessState)other.state;
    return end(result);
}

API CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
    struct sim_machine machine;
    CUresult result = begin(__func__, pid, &machine);
    if (result != CUDA_SUCCESS)
        return result;
    return tid ? end(restore_thread(pid, tid)) : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *arguments)
{
    struct sim_machine machine;
    CUresult result = begin(__func__, pid, &machine);
    if (result != CUDA_SUCCESS)
        return result;
    if (arguments && (arguments->reserved0 || !zero(arguments->reserved1, sizeof(uint64_t) * 7)))
        return CUDA_ERROR_INVALID_VALUE;
    struct command command = {.op = COMMAND_LOCK,
                              .timeout_ms = arguments ? arguments->timeoutMs : 0};
    return end(send_command(pid, &command, NULL));
}

API CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *arguments)
{
    struct sim_machine machine;
    CUresult result = begin(__func__, pid, &machine);
    if (result != CUDA_SUCCESS)
        return result;
    if (arguments && !zero(arguments, sizeof(*arguments)))
        return CUDA_ERROR_INVALID_VALUE;
    struct command command = {.op = COMMAND_UNLOCK};
    return end(send_command(pid, &command, NULL));
}

// Show the device memory of the process that shared it under `token` at addresses of this one.
static CUresult map_devices(int pid, uint64_t token, CUcheckpointCustomStorageInfo **out)
{
    CUcheckpointOperationHandle operation = calloc(1, sizeof(*operation));
    if (!operation)
        return CUDA_ERROR_OUT_OF_MEMORY;
    operation->pid = pid;
    operation->info.handle = operation;
    operation->info.perDeviceData = operation->devices;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&driver.mutex);
    for (int i = 0; i < (int)driver.machine.gpu_count && result == CUDA_SUCCESS; i++) {
        uint64_t size = 0;
        CUdeviceptr address = driver.next_address;
        result = device_receive(SIM_MAP, i, token, address, NULL, 0, &size);
        if (result != CUDA_SUCCESS || size == 0)
            continue;
        struct allocation *view = calloc(1, sizeof(*view));
        if (!view) {
            result = CUDA_ERROR_OUT_OF_MEMORY;
            break;
        }
        take_addresses(size);
        *view = (struct allocation){address, size, i, NULL, driver.allocations};
        driver.allocations = view;
        operation->devices[operation->info.deviceCount++] =
            (CUcheckpointCustomStoragePerDeviceData){address, size, stream_of_gpu(i)};
    }
    operation->next = operations;
    operations = operation;
    pthread_mutex_unlock(&driver.mutex);
    *out = &operation->info;
    return result;
}

// Where another process's memory is to be shown: under which token, and on which GPUs it can be.
static CUresult ask_to_see(const struct sim_machine *machine, bool custom, struct command *command)
{
    uint64_t *token = &command->token;
    for (int i = 0; i < driver.visible_count; i++)
        if (driver.primary[i].references > 0)
            command->contexts |= 1ULL << driver.primary[i].gpu;
    if (!custom)
        return CUDA_SUCCESS;
    if ((int)machine->cuda_version < CUSTOM_STORAGE_SINCE)
        return CUDA_ERROR_INVALID_VALUE; // what this driver takes for a reserved field
    if (!driver.initialised)
        return CUDA_ERROR_NOT_INITIALIZED;
    return getrandom(token, sizeof(*token), 0) == (ssize_t)sizeof(*token)
               ? CUDA_SUCCESS
               : CUDA_ERROR_OPERATING_SYSTEM;
}

API CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *arguments)
{
    struct sim_machine machine;
    CUresult result = begin(__func__, pid, &machine);
    if (result != CUDA_SUCCESS)
        return result;
    struct command command = {.op = COMMAND_CHECKPOINT};
    if (arguments && !zero(arguments->reserved, sizeof(arguments->reserved)))
        return CUDA_ERROR_INVALID_VALUE;
    bool custom = arguments && arguments->customStorageInfo_out;
    result = ask_to_see(&machine, custom, &command);
    if (result == CUDA_SUCCESS)
        result = send_command(pid, &command, NULL);
    if (result == CUDA_SUCCESS && custom)
        result = map_devices(pid, command.token, arguments->customStorageInfo_out);
    return end(result);
}

static bool persistent(const struct sim_machine *machine)
{
    for (uint32_t i = 0; i < machine->gpu_count; i++)
        if (!machine->gpus[i].persistence)
            return false;
    return true;
}

API CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *arguments)
{
    struct sim_machine machine;
    CUresult result = begin(__func__, pid, &machine);
    if (result != CUDA_SUCCESS)
        return result;
    struct command command = {.op = COMMAND_RESTORE};
    sim_machine_folder(command.folder);
    bool custom = false;
    if (arguments) {
        custom = arguments->customStorageInfo_out;
        unsigned int count = arguments->gpuPairsCount;
        if (arguments->padding0 || !zero(arguments->reserved, sizeof(arguments->reserved)) ||
            (count && !arguments->gpuPairs) || count > SIM_MAX_GPUS * 2 ||
            (count && (int)machine.cuda_version < GPU_PAIRS_SINCE))
            return CUDA_ERROR_INVALID_VALUE;
        command.pair_count = count;
        if (count)
            memcpy(command.pairs, arguments->gpuPairs, count * sizeof(*command.pairs));
    }
    if (!driver.initialised && !persistent(&machine))
        return CUDA_ERROR_NOT_INITIALIZED;
    result = ask_to_see(&machine, custom, &command);
    if (result == CUDA_SUCCESS)
        result = send_command(pid, &command, NULL);
    if (result == CUDA_SUCCESS && custom)
        result = map_devices(pid, command.token, arguments->customStorageInfo_out);
    return end(result);
}

// Where it is in the list of those that are not complete; NULL is there when it is not. With driver.mutex held.
static CUcheckpointOperationHandle *find_operation(CUcheckpointOperationHandle operation)
{
    CUcheckpointOperationHandle *at = &operations;
    while (*at && *at != operation)
        at = &(*at)->next;
    return at;
}

API CUresult cuCheckpointOperationComplete(CUcheckpointOperationHandle operation)
{
    struct sim_machine machine;
    if (!operation)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.mutex);
    bool known = *find_operation(operation);
    pthread_mutex_unlock(&driver.mutex);
    if (!known)
        abort(); // it is complete, and gone: the real driver may do anything then
    CUresult result = begin(__func__, operation->pid, &machine);
    if (result != CUDA_SUCCESS)
        return result;
    result = wait_for_work(0);
    for (unsigned int i = 0; i < operation->info.deviceCount; i++) {
        pthread_mutex_lock(&driver.mutex);
        for (struct allocation **at = &driver.allocations; *at; at = &(*at)->next) {
            struct allocation *one = *at;
            if (one->address == operation->devices[i].devPtr) {
                device_call(SIM_FREE, one->gpu, one->address, 0, 0);
                *at = one->next;
                free(one);
                break;
            }
        }
        pthread_mutex_unlock(&driver.mutex);
    }
    struct command command = {.op = COMMAND_COMPLETE};
    if (result == CUDA_SUCCESS)
        result = send_command(operation->pid, &command, NULL);
    if (result == CUDA_SUCCESS) {
        pthread_mutex_lock(&driver.mutex);
        *find_operation(operation) = operation->next;
        pthread_mutex_unlock(&driver.mutex);
        free(operation);
    }
    return end(result);
}
