// SPDX-License-Identifier: BSD-3-Clause
// The part of NVML that inventories use. It holds nothing open between calls.
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "abi.h"
#include "faults.h"
#include "wire.h"

typedef enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_FUNCTION_NOT_FOUND = 13,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_MEMORY = 20,
    NVML_ERROR_UNKNOWN = 999,
} nvmlReturn_t;

// One for each GPU, by its index; what it stands for is asked for anew with each call.
struct device {
    int unused;
};
static struct device devices[SIM_MAX_GPUS];
typedef struct device *nvmlDevice_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;
_Static_assert(sizeof(nvmlMemory_v2_t) == 40, "part of the interface");

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId;
    unsigned int computeInstanceId;
} nvmlProcessInfo_t;
_Static_assert(sizeof(nvmlProcessInfo_t) == 24, "part of the interface");

typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;
_Static_assert(sizeof(nvmlPciInfo_t) == 68, "part of the interface");

typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

enum { EVENT_XID = 8, MODE_OFF = 0 };

struct nvmlEventSet_st {
    uint64_t serial;
    bool registered[SIM_MAX_GPUS];
};
typedef struct nvmlEventSet_st *nvmlEventSet_t;

static unsigned int initialised;

static nvmlReturn_t look(const char *function, struct sim_machine *machine)
{
    int fault = sim_fault(function);
    if (fault > 0)
        return (nvmlReturn_t)fault;
    if (initialised == 0)
        return NVML_ERROR_UNINITIALIZED;
    char folder[SIM_FOLDER];
    sim_machine_folder(folder);
    return sim_describe(folder, machine) ? NVML_SUCCESS : NVML_ERROR_DRIVER_NOT_LOADED;
}

// The GPU of a handle, on a machine that is there.
static nvmlReturn_t look_at(const char *function, nvmlDevice_t device, struct sim_machine *machine,
                            struct sim_gpu **gpu)
{
    nvmlReturn_t result = look(function, machine);
    if (result != NVML_SUCCESS)
        return result;
    ptrdiff_t index = device ? device - devices : -1;
    if (index < 0 || index >= (ptrdiff_t)machine->gpu_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *gpu = &machine->gpus[index];
    return (*gpu)->lost ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

#define LOOK                                                  \
    struct sim_machine machine;                               \
    do {                                                      \
        nvmlReturn_t looked_ = look(__func__, &machine);      \
        if (looked_ != NVML_SUCCESS)                          \
            return looked_;                                   \
    } while (0)

#define LOOK_AT(device)                                                   \
    struct sim_machine machine;                                           \
    struct sim_gpu *gpu = NULL;                                           \
    do {                                                                  \
        nvmlReturn_t looked_ = look_at(__func__, device, &machine, &gpu); \
        if (looked_ != NVML_SUCCESS)                                      \
            return looked_;                                               \
    } while (0)

static int ask(enum sim_op op, const struct sim_gpu *gpu, uint64_t a, uint64_t b, void *out,
               size_t size, uint64_t *value)
{
    char folder[SIM_FOLDER];
    sim_machine_folder(folder);
    struct sim_connection connection = {sim_connect(folder), PTHREAD_MUTEX_INITIALIZER};
    struct sim_request request = {.op = op, .a = a, .b = b};
    if (gpu)
        memcpy(request.uuid, gpu->uuid, sizeof(request.uuid));
    int status = sim_call(&connection, request, NULL, out, size, value);
    if (connection.fd >= 0)
        close(connection.fd);
    return status;
}

API nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    int fault = sim_fault(__func__);
    if (fault > 0)
        return (nvmlReturn_t)fault;
    char folder[SIM_FOLDER];
    struct sim_machine machine;
    sim_machine_folder(folder);
    if (!sim_describe(folder, &machine))
        return NVML_ERROR_DRIVER_NOT_LOADED;
    initialised++;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

API nvmlReturn_t nvmlShutdown(void)
{
    if (initialised == 0)
        return NVML_ERROR_UNINITIALIZED;
    initialised--;
    return NVML_SUCCESS;
}

static nvmlReturn_t text(char *out, unsigned int length, const char *content)
{
    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(content) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(out, content, strlen(content) + 1);
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    LOOK;
    return text(version, length, machine.driver);
}

API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    LOOK;
    char own[48];
    snprintf(own, sizeof(own), "%u.%.31s", machine.cuda_version / 1000, machine.driver);
    return text(version, length, own);
}

API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    LOOK;
    if (!version)
        return NVML_ERROR_INVALID_ARGUMENT;
    *version = (int)machine.cuda_version;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    return nvmlSystemGetCudaDriverVersion(version);
}

API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    LOOK;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = machine.gpu_count;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    LOOK;
    if (!device || index >= machine.gpu_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = &devices[index];
    return machine.gpus[index].lost ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

static void format_uuid(const uint8_t uuid[16], char out[48])
{
    int at = snprintf(out, 48, "GPU-");
    for (int i = 0; i < 16; i++) {
        const char *dash = i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "";
        at += snprintf(out + at, 48 - (size_t)at, "%s%02x", dash, uuid[i]);
    }
}

API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    LOOK;
    if (!uuid || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t i = 0; i < machine.gpu_count; i++) {
        char own[48];
        format_uuid(machine.gpus[i].uuid, own);
        if (strcasecmp(own, uuid) == 0) {
            *device = &devices[i];
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

static void format_bus(const struct sim_gpu *gpu, char out[32])
{
    snprintf(out, 32, "00000000:%02X:00.0", gpu->pci_bus);
}

API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *device)
{
    LOOK;
    if (!bus || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint32_t i = 0; i < machine.gpu_count; i++) {
        char own[32];
        format_bus(&machine.gpus[i], own);
        // The domain has four digits or eight.
        if (strcasecmp(own, bus) == 0 || strcasecmp(own + 4, bus) == 0) {
            *device = &devices[i];
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    LOOK_AT(device);
    if (!index)
        return NVML_ERROR_INVALID_ARGUMENT;
    *index = (unsigned int)(gpu - machine.gpus);
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    LOOK_AT(device);
    return text(name, length, gpu->name);
}

API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    LOOK_AT(device);
    char own[48];
    format_uuid(gpu->uuid, own);
    return text(uuid, length, own);
}

API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info)
{
    LOOK_AT(device);
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    *info = (nvmlPciInfo_t){.bus = gpu->pci_bus, .pciDeviceId = 0x10de};
    format_bus(gpu, info->busId);
    memcpy(info->busIdLegacy, info->busId + 4, 13);
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    LOOK_AT(device);
    if (!major || !minor)
        return NVML_ERROR_INVALID_ARGUMENT;
    *major = (int)gpu->cc_major;
    *minor = (int)gpu->cc_minor;
    return NVML_SUCCESS;
}

static nvmlReturn_t memory(const struct sim_gpu *gpu, uint64_t numbers[2])
{
    int status = ask(SIM_MEMORY, gpu, 0, 0, numbers, 2 * sizeof(uint64_t), NULL);
    return status == CUDA_SUCCESS ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}

API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *info)
{
    LOOK_AT(device);
    uint64_t numbers[2] = {0};
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    nvmlReturn_t result = memory(gpu, numbers);
    *info = (nvmlMemory_t){numbers[1], numbers[0], numbers[1] - numbers[0]};
    return result;
}

API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *info)
{
    LOOK_AT(device);
    uint64_t numbers[2] = {0};
    if (!info || info->version != (sizeof(*info) | 2u << 24))
        return NVML_ERROR_INVALID_ARGUMENT;
    nvmlReturn_t result = memory(gpu, numbers);
    info->total = numbers[1];
    info->reserved = 0;
    info->free = numbers[0];
    info->used = numbers[1] - numbers[0];
    return result;
}

// The processes on a GPU; their numbers are those that the machine sees.
static nvmlReturn_t processes(const struct sim_gpu *gpu, unsigned int *count,
                              nvmlProcessInfo_t *infos)
{
    struct {
        uint32_t pid, reserved;
        uint64_t used;
    } found[256] = {0};
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (ask(SIM_PROCESSES, gpu, 0, 0, found, sizeof(found), NULL) != CUDA_SUCCESS)
        return NVML_ERROR_UNKNOWN;
    unsigned int room = *count, number = 0;
    while (number < 256 && found[number].used + found[number].pid > 0)
        number++;
    *count = number;
    if (number > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; infos && i < number; i++)
        infos[i] = (nvmlProcessInfo_t){found[i].pid, found[i].used, 0xffffffffu, 0xffffffffu};
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                         nvmlProcessInfo_t *infos)
{
    LOOK_AT(device);
    return processes(gpu, count, infos);
}

// Those that reach the GPU through an MPS server: all or none.
API nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device,
                                                            unsigned int *count,
                                                            nvmlProcessInfo_t *infos)
{
    LOOK_AT(device);
    if (gpu->mps)
        return processes(gpu, count, infos);
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link,
                                          unsigned int *active)
{
    LOOK_AT(device);
    if (!active)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (gpu->nvlinks == 0)
        return NVML_ERROR_NOT_SUPPORTED;
    *active = link < gpu->nvlinks;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *count,
                                                         nvmlProcessInfo_t *infos)
{
    return nvmlDeviceGetComputeRunningProcesses_v3(device, count, infos);
}

API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current,
                                      unsigned int *pending)
{
    LOOK_AT(device);
    if (!current || !pending)
        return NVML_ERROR_INVALID_ARGUMENT;
    *current = *pending = gpu->mig;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, unsigned int *mode)
{
    LOOK_AT(device);
    if (!mode)
        return NVML_ERROR_INVALID_ARGUMENT;
    *mode = gpu->persistence;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, unsigned int *mode)
{
    LOOK_AT(device);
    if (!mode)
        return NVML_ERROR_INVALID_ARGUMENT;
    *mode = MODE_OFF;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    LOOK;
    if (!set)
        return NVML_ERROR_INVALID_ARGUMENT;
    *set = calloc(1, sizeof(**set));
    if (!*set)
        return NVML_ERROR_MEMORY;
    // Those that happened before are not told.
    ask(SIM_EVENTS, NULL, UINT64_MAX, 0, NULL, 0, &(*set)->serial);
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    LOOK_AT(device);
    if (!types)
        return NVML_ERROR_INVALID_ARGUMENT;
    *types = EVENT_XID;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types,
                                          nvmlEventSet_t set)
{
    LOOK_AT(device);
    if (!set)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (types & ~(unsigned long long)EVENT_XID)
        return NVML_ERROR_NOT_SUPPORTED;
    set->registered[gpu - machine.gpus] = types != 0;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data,
                                     unsigned int timeout_ms)
{
    LOOK;
    if (!set || !data)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (;;) {
        struct {
            uint8_t uuid[16];
            uint64_t code, reserved;
        } event = {0};
        uint64_t serial = set->serial;
        if (ask(SIM_EVENTS, NULL, serial, timeout_ms, &event, sizeof(event), &serial) !=
            CUDA_SUCCESS)
            return NVML_ERROR_UNKNOWN;
        if (serial == set->serial)
            return NVML_ERROR_TIMEOUT;
        set->serial = serial;
        for (uint32_t i = 0; i < machine.gpu_count; i++) {
            if (set->registered[i] && memcmp(machine.gpus[i].uuid, event.uuid, 16) == 0) {
                *data = (nvmlEventData_t){&devices[i], EVENT_XID, event.code, 0xffffffffu,
                                          0xffffffffu};
                return NVML_SUCCESS;
            }
        }
    }
}

API nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    free(set);
    return NVML_SUCCESS;
}

API const char *nvmlErrorString(nvmlReturn_t result)
{
    switch (result) {
    case NVML_SUCCESS:
        return "Success";
    case NVML_ERROR_UNINITIALIZED:
        return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT:
        return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED:
        return "Not Supported";
    case NVML_ERROR_NO_PERMISSION:
        return "Insufficient Permissions";
    case NVML_ERROR_NOT_FOUND:
        return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE:
        return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED:
        return "Driver Not Loaded";
    case NVML_ERROR_TIMEOUT:
        return "Timeout";
    case NVML_ERROR_FUNCTION_NOT_FOUND:
        return "Function Not Found";
    case NVML_ERROR_GPU_IS_LOST:
        return "GPU is lost";
    case NVML_ERROR_MEMORY:
        return "Memory Error";
    case NVML_ERROR_UNKNOWN:
    default:
        return "Unknown Error";
    }
}
