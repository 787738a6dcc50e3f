// SPDX-License-Identifier: BSD-3-Clause
// cuInit, the driver's version, the GPUs.
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "driver.h"
#include "faults.h"

enum {
    DEFAULT_CUDA_VERSION = 13000,
    ATTRIBUTE_MAX_THREADS_PER_BLOCK = 1,
    ATTRIBUTE_WARP_SIZE = 10,
    ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    ATTRIBUTE_CONCURRENT_KERNELS = 31,
    ATTRIBUTE_PCI_BUS_ID = 33,
    ATTRIBUTE_PCI_DEVICE_ID = 34,
    ATTRIBUTE_UNIFIED_ADDRESSING = 41,
    ATTRIBUTE_PCI_DOMAIN_ID = 50,
    ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    ATTRIBUTE_MANAGED_MEMORY = 83,
};

static void format_uuid(const uint8_t uuid[16], char text[48])
{
    int at = snprintf(text, 48, "GPU-");
    for (int i = 0; i < 16; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10)
            at += snprintf(text + at, 48 - (size_t)at, "-");
        at += snprintf(text + at, 48 - (size_t)at, "%02x", uuid[i]);
    }
}

// An index or a GPU's name (or the beginning of one); -1 where there is none.
static int named_gpu(const char *word)
{
    if (strncmp(word, "GPU-", 4) == 0) {
        for (uint32_t i = 0; i < driver.machine.gpu_count; i++) {
            char text[48];
            format_uuid(driver.machine.gpus[i].uuid, text);
            if (strncmp(word, text, strlen(word)) == 0)
                return (int)i;
        }
        return -1;
    }
    char *end;
    long index = strtol(word, &end, 10);
    return *end || end == word || index < 0 || index >= (long)driver.machine.gpu_count ? -1
                                                                                      : (int)index;
}

// As the real driver: the list ends at the first entry that is not valid.
static void choose_visible(void)
{
    driver.visible_count = 0;
    const char *chosen = getenv("CUDA_VISIBLE_DEVICES");
    if (!chosen) {
        for (uint32_t i = 0; i < driver.machine.gpu_count; i++)
            driver.visible[driver.visible_count++] = (int)i;
        return;
    }
    char list[1024];
    snprintf(list, sizeof(list), "%s", chosen);
    char *rest = list, *word;
    while ((word = strsep(&rest, ",")) && driver.visible_count < SIM_MAX_GPUS) {
        int gpu = named_gpu(word);
        if (gpu < 0)
            return;
        driver.visible[driver.visible_count++] = gpu;
    }
}

CUresult connect_devices(void)
{
    int fd = sim_connect(driver.folder);
    if (fd < 0)
        return CUDA_ERROR_NO_DEVICE;
    driver.connection.fd = fd;
    struct sim_machine machine = {0};
    CUresult result = device_receive(SIM_HELLO, -1, (uint64_t)getpid(), 0, &machine,
                                     sizeof(machine), NULL);
    if (result == CUDA_SUCCESS)
        driver.machine = machine;
    return result;
}

// In a child of fork the driver does not work. It has the device files of its parent, though, where
// the machine is of that kind.
static void in_child(void)
{
    if (!driver.initialised)
        return;
    driver.forked = true;
    if (!(driver.machine.flags & SIM_CHILDREN_KEEP_DEVICES) && driver.connection.fd >= 0)
        close(driver.connection.fd);
    driver.connection.fd = -1;
    forget_driver_thread();
}

API CUresult cuInit(unsigned int flags)
{
    CUresult result = gate_call(__func__);
    if (result != CUDA_SUCCESS)
        return result;
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (driver.forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&once);
    if (!driver.initialised) {
        sim_machine_folder(driver.folder);
        result = connect_devices();
        if (result == CUDA_SUCCESS) {
            choose_visible();
            result = driver.visible_count == 0 ? CUDA_ERROR_NO_DEVICE : start_driver_thread();
        }
        if (result == CUDA_SUCCESS) {
            pthread_atfork(NULL, NULL, in_child);
            driver.initialised = true;
        } else if (driver.connection.fd >= 0) {
            close(driver.connection.fd);
            driver.connection.fd = -1;
        }
    }
    pthread_mutex_unlock(&once);
    return (CUresult)sim_fault_after((int)result);
}

API CUresult cuDriverGetVersion(int *version)
{
    CUresult result = gate_call(__func__);
    if (result != CUDA_SUCCESS)
        return result;
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    char folder[SIM_FOLDER];
    struct sim_machine machine;
    sim_machine_folder(folder);
    *version = sim_describe(folder, &machine) ? (int)machine.cuda_version : DEFAULT_CUDA_VERSION;
    return CUDA_SUCCESS;
}

static bool known(CUdevice device)
{
    return driver.initialised && device >= 0 && device < driver.visible_count;
}

static const struct sim_gpu *gpu_of(CUdevice device)
{
    return &driver.machine.gpus[driver.visible[device]];
}

API CUresult cuDeviceGetCount(int *count)
{
    if (!driver.initialised)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = driver.visible_count;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    if (!driver.initialised)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    if (!known(ordinal))
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    if (!known(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!name || length <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(name, (size_t)length, "%s", gpu_of(device)->name);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    if (!known(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!uuid)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(uuid, gpu_of(device)->uuid, sizeof(*uuid));
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    return cuDeviceGetUuid(uuid, device);
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    if (!known(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    *bytes = gpu_of(device)->total;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device)
{
    if (!known(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!text || length <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(text, (size_t)length, "0000:%02X:00.0", gpu_of(device)->pci_bus);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    if (!known(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!value || attribute <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = 1024;
        break;
    case ATTRIBUTE_WARP_SIZE:
        *value = 32;
        break;
    case ATTRIBUTE_MULTIPROCESSOR_COUNT:
    case ATTRIBUTE_CONCURRENT_KERNELS:
    case ATTRIBUTE_UNIFIED_ADDRESSING:
    case ATTRIBUTE_MANAGED_MEMORY:
        *value = 1;
        break;
    case ATTRIBUTE_PCI_BUS_ID:
        *value = (int)gpu_of(device)->pci_bus;
        break;
    case ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = (int)gpu_of(device)->cc_major;
        break;
    case ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        *value = (int)gpu_of(device)->cc_minor;
        break;
    case ATTRIBUTE_PCI_DEVICE_ID:
    case ATTRIBUTE_PCI_DOMAIN_ID:
    default:
        *value = 0;
    }
    return CUDA_SUCCESS;
}
