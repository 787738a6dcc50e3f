// SPDX-License-Identifier: BSD-3-Clause
// Modules and kernels: a module holds the four kernels that the machine knows (README.md).
#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "faults.h"

enum { ARGUMENTS = 4 };

// Each argument: 'q' of 8 bytes, 'i' of 4. The last one is how long the kernel takes, in ms.
struct CUfunc_st {
    const char *name;
    const char *arguments;
};

static struct CUfunc_st kernels[] = {
    {"checksum", "qqqi"}, // address, size, where the CRC-32 goes (8 bytes)
    {"fill", "qqii"},     // address, size, seed
    {"add", "qqi"},       // address of an integer of 8 bytes, what is added
    {"spin", "i"},
};

struct CUmod_st {
    int unused;
};

API CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    ENTER;
    if (!module || !image)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    if (!current_context())
        LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (strncmp(image, "simgpu", 6) != 0)
        LEAVE(CUDA_ERROR_INVALID_IMAGE);
    *module = calloc(1, sizeof(**module));
    LEAVE(*module ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

API CUresult cuModuleUnload(CUmodule module)
{
    ENTER;
    free(module);
    LEAVE(CUDA_SUCCESS);
}

API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    ENTER;
    if (!function || !module || !name)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    for (size_t i = 0; i < sizeof(kernels) / sizeof(*kernels); i++) {
        if (strcmp(kernels[i].name, name) == 0) {
            *function = &kernels[i];
            LEAVE(CUDA_SUCCESS);
        }
    }
    LEAVE(CUDA_ERROR_NOT_FOUND);
}

API CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                            unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                            unsigned int block_z, unsigned int shared, CUstream stream,
                            void **parameters, void **extra)
{
    (void)shared;
    (void)stream;
    ENTER;
    CUcontext context = current_context();
    if (!context)
        LEAVE(CUDA_ERROR_INVALID_CONTEXT);
    if (!function || !parameters || extra || !grid_x || !grid_y || !grid_z || !block_x ||
        !block_y || !block_z)
        LEAVE(CUDA_ERROR_INVALID_VALUE);
    struct {
        char name[16];
        uint64_t arguments[ARGUMENTS];
    } launch = {0};
    strncpy(launch.name, function->name, sizeof(launch.name) - 1);
    size_t count = strlen(function->arguments);
    for (size_t i = 0; i < count; i++) {
        // The duration comes last, whatever else there is.
        uint64_t *to = &launch.arguments[i == count - 1 ? ARGUMENTS - 1 : i];
        memcpy(to, parameters[i], function->arguments[i] == 'q' ? 8 : 4);
    }
    LEAVE(device_send(SIM_LAUNCH, context->gpu, 0, 0, &launch, sizeof(launch)));
}
