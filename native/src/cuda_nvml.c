/* SPDX-License-Identifier: BSD-3-Clause */
#include "cuda_nvml.h"

#include <dlfcn.h>
#include <string.h>

#include "cuda_driver.h"

enum { SUCCESS = 0, PROCESSES_MAX = 512 };

_Static_assert(sizeof(struct cuda_nvml_process) == 24 && sizeof(struct cuda_nvml_memory) == 24,
               "the library's structures are laid out so");

void cuda_nvml_bind(void *library, struct cuda_nvml *nvml)
{
    const struct {
        const char *name;
        void *function;
    } wanted[] = {
        {"nvmlInit_v2", &nvml->init},
        {"nvmlSystemGetDriverVersion", &nvml->driver_version},
        {"nvmlDeviceGetHandleByUUID", &nvml->device_by_uuid},
        {"nvmlDeviceGetMemoryInfo", &nvml->memory},
        {"nvmlDeviceGetMigMode", &nvml->mig_mode},
        {"nvmlDeviceGetComputeRunningProcesses_v3", &nvml->processes},
        {"nvmlDeviceGetMPSComputeRunningProcesses_v3", &nvml->mps_processes},
    };
    *nvml = (struct cuda_nvml){.loaded = false};
    for (size_t i = 0; library != NULL && i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        void *found = dlsym(library, wanted[i].name);
        if (found == NULL)
            return;
        memcpy(wanted[i].function, &found, sizeof(found));
    }
    nvml->loaded = library != NULL && nvml->init() == SUCCESS;
}

void cuda_nvml_driver_version(const struct cuda_nvml *nvml, char *version, unsigned length)
{
    if (!nvml->loaded || nvml->driver_version(version, length) != SUCCESS)
        version[0] = '\0';
    version[length - 1] = '\0';
}

static struct cuda_nvml_device *device(const struct cuda_nvml *nvml, const struct cuda_uuid *gpu)
{
    char uuid[CUDA_UUID_TEXT];
    struct cuda_nvml_device *found = NULL;
    cuda_format_uuid(gpu, uuid);
    return nvml->loaded && nvml->device_by_uuid(uuid, &found) == SUCCESS ? found : NULL;
}

int64_t cuda_nvml_free_memory(const struct cuda_nvml *nvml, const struct cuda_uuid *gpu)
{
    struct cuda_nvml_device *found = device(nvml, gpu);
    struct cuda_nvml_memory memory;
    return found != NULL && nvml->memory(found, &memory) == SUCCESS ? (int64_t)memory.free : -1;
}

bool cuda_nvml_mig(const struct cuda_nvml *nvml, const struct cuda_uuid *gpu)
{
    struct cuda_nvml_device *found = device(nvml, gpu);
    unsigned current = 0;
    unsigned pending = 0;
    return found != NULL && nvml->mig_mode(found, &current, &pending) == SUCCESS && current == 1;
}

static bool find(int (*list)(struct cuda_nvml_device *, unsigned *, struct cuda_nvml_process *),
                 struct cuda_nvml_device *gpu, pid_t pid, unsigned long long *memory)
{
    static struct cuda_nvml_process processes[PROCESSES_MAX];
    unsigned count = PROCESSES_MAX;
    if (gpu == NULL || list(gpu, &count, processes) != SUCCESS)
        return false;
    for (unsigned i = 0; i < count && i < PROCESSES_MAX; i++)
        if (processes[i].pid == (unsigned)pid) {
            *memory = processes[i].memory;
            return true;
        }
    return false;
}

bool cuda_nvml_is_on(const struct cuda_nvml *nvml, const struct cuda_uuid *gpu, pid_t pid)
{
    unsigned long long memory;
    return find(nvml->processes, device(nvml, gpu), pid, &memory);
}

int64_t cuda_nvml_used_by(const struct cuda_nvml *nvml, const struct cuda_uuid *gpu, pid_t pid)
{
    static const unsigned long long not_known = ~0ULL;
    unsigned long long memory;
    return find(nvml->processes, device(nvml, gpu), pid, &memory) && memory != not_known
               ? (int64_t)memory
               : 0;
}

bool cuda_nvml_is_on_by_mps(const struct cuda_nvml *nvml, const struct cuda_uuid *gpu, pid_t pid)
{
    unsigned long long memory;
    return find(nvml->mps_processes, device(nvml, gpu), pid, &memory);
}
