/* SPDX-License-Identifier: BSD-3-Clause */
#include "cuda_driver.h"

#include <ctype.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "caps.h"
#include "trust.h"

/* Where the node's driver is mounted without the linker knowing (Google Kubernetes Engine). */
static const char place[] = "/usr/local/nvidia/lib64";

typedef int (*get_proc_address)(const char *symbol, void **function, int version, uint64_t flags,
                                int *status);

/* A function as the driver names it for that version of the interface, or as the library does: `symbol`, in which
 * "_v2" stands for parameters that the plain symbol does not have. */
static void *find(void *library, get_proc_address lookup, const char *symbol, int version)
{
    char name[64];
    void *function = NULL;
    int status = 0;
    snprintf(name, sizeof(name), "%s", symbol);
    char *end = strstr(name, "_v2");
    if (end != NULL)
        *end = '\0';
    if (lookup != NULL && lookup(name, &function, version, 0, &status) == CUDA_SUCCESS &&
        status == 0 && function != NULL)
        return function;
    return dlsym(library, symbol);
}

/* Each in the version whose parameters are used here: later ones of the same names have others. */
static bool bind_storage(void *library, get_proc_address lookup, struct cuda_driver *driver)
{
    const struct {
        const char *name;
        int version;
        void *function;
    } wanted[] = {
        {"cuCheckpointOperationComplete", CUDA_CUSTOM_STORAGE_SINCE, &driver->complete},
        {"cuDevicePrimaryCtxRetain", 7000, &driver->retain_context},
        {"cuStreamGetCtx", 9020, &driver->stream_context},
        {"cuCtxSetCurrent", 4000, &driver->set_context},
        {"cuCtxGetDevice", 2000, &driver->context_device},
        {"cuMemcpyDtoHAsync_v2", 3020, &driver->to_host},
        {"cuMemcpyHtoDAsync_v2", 3020, &driver->to_device},
        {"cuStreamSynchronize", 2000, &driver->wait_stream},
        {"cuMemHostRegister_v2", 6050, &driver->pin},
    };
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        void *found = find(library, lookup, wanted[i].name, wanted[i].version);
        if (found == NULL)
            return false;
        memcpy(wanted[i].function, &found, sizeof(found));
    }
    return true;
}

static enum cuda_load bind(void *library, struct cuda_driver *driver)
{
    get_proc_address lookup;
    int (*get_version)(int *);
    void *found = dlsym(library, "cuGetProcAddress_v2");
    memcpy(&lookup, &found, sizeof(found));
    found = find(library, lookup, "cuDriverGetVersion", CUDA_CHECKPOINT_SINCE);
    memcpy(&get_version, &found, sizeof(found));
    if (get_version == NULL || get_version(&driver->version) != CUDA_SUCCESS)
        return CUDA_NO_LIBRARY;
    const struct {
        const char *name;
        void *function;
    } wanted[] = {
        {"cuInit", &driver->init},
        {"cuGetErrorName", &driver->get_error_name},
        {"cuGetErrorString", &driver->get_error_string},
        {"cuDeviceGetCount", &driver->device_get_count},
        {"cuDeviceGet", &driver->device_get},
        {"cuDeviceGetUuid", &driver->device_get_uuid},
        {"cuDeviceGetName", &driver->device_get_name},
        {"cuDeviceTotalMem_v2", &driver->device_total_mem},
        {"cuCheckpointProcessGetState", &driver->get_state},
        {"cuCheckpointProcessLock", &driver->lock},
        {"cuCheckpointProcessCheckpoint", &driver->checkpoint},
        {"cuCheckpointProcessRestore", &driver->restore},
        {"cuCheckpointProcessUnlock", &driver->unlock},
    };
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        found = find(library, lookup, wanted[i].name, CUDA_CHECKPOINT_SINCE);
        if (found == NULL)
            return CUDA_TOO_OLD;
        memcpy(wanted[i].function, &found, sizeof(found));
    }
    driver->custom_storage =
        driver->version >= CUDA_CUSTOM_STORAGE_SINCE && bind_storage(library, lookup, driver);
    return CUDA_LOADED;
}

enum cuda_load cuda_driver_load_file(const char *path, struct cuda_driver *driver)
{
    *driver = (struct cuda_driver){.version = 0};
    void *library = path == NULL ? NULL : dlopen(path, RTLD_NOW | RTLD_LOCAL);
    return library == NULL ? CUDA_NO_LIBRARY : bind(library, driver);
}

/* The path of a library in that place, NULL where it is not or cannot be trusted. */
static const char *placed(const char *name, char resolved[PATH_MAX])
{
    char path[sizeof(place) + 32];
    const char *why;
    snprintf(path, sizeof(path), "%s/%s", place, name);
    return access(path, F_OK) == 0 &&
                   trust_resolve(path, caps_beyond_caller() ? 0 : getuid(), resolved, &why)
               ? resolved
               : NULL;
}

static void load_nvml(struct cuda_nvml *nvml)
{
    static const char name[] = "libnvidia-ml.so.1";
    char resolved[PATH_MAX];
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    const char *path = library == NULL ? placed(name, resolved) : NULL;
    cuda_nvml_bind(path != NULL ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : library, nvml);
}

enum cuda_load cuda_driver_load(struct cuda_driver *driver)
{
    static const char name[] = "libcuda.so.1";
    char resolved[PATH_MAX];
    enum cuda_load loaded = cuda_driver_load_file(name, driver);
    if (loaded == CUDA_NO_LIBRARY)
        loaded = cuda_driver_load_file(placed(name, resolved), driver);
    driver->bind_nvml = load_nvml;
    return loaded;
}

void cuda_error_words(const struct cuda_driver *driver, int error, char *text, size_t capacity)
{
    const char *name = NULL;
    const char *words = NULL;
    if (driver->get_error_name(error, &name) != CUDA_SUCCESS || name == NULL)
        snprintf(text, capacity, "CUDA error %d", error);
    else if (driver->get_error_string(error, &words) != CUDA_SUCCESS || words == NULL)
        snprintf(text, capacity, "%.60s", name);
    else
        snprintf(text, capacity, "%.60s (%.160s)", name, words);
}

static int digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c = (char)tolower((unsigned char)c);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

bool cuda_parse_uuid(const char *text, char end, struct cuda_uuid *uuid)
{
    static const char form[] = "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx";
    unsigned count = 0;
    for (size_t i = 0; form[i] != '\0'; i++) {
        if (form[i] != 'x') {
            if (text[i] != form[i])
                return false;
            continue;
        }
        int value = digit(text[i]);
        if (value < 0)
            return false;
        unsigned char *byte = &uuid->bytes[count / 2];
        *byte = (unsigned char)(count % 2 == 0 ? value << 4 : *byte | value);
        count++;
    }
    return text[sizeof(form) - 1] == end || text[sizeof(form) - 1] == '\0';
}

void cuda_format_uuid(const struct cuda_uuid *uuid, char text[CUDA_UUID_TEXT])
{
    static const char digits[] = "0123456789abcdef";
    char *out = text;
    memcpy(out, "GPU-", 4);
    out += 4;
    for (unsigned i = 0; i < 16; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10)
            *out++ = '-';
        *out++ = digits[uuid->bytes[i] >> 4];
        *out++ = digits[uuid->bytes[i] & 15];
    }
    *out = '\0';
}
