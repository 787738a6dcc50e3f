/* SPDX-License-Identifier: BSD-3-Clause */
#include "cuda_checks.h"

#include <string.h>

#include "cuda_storage.h"
#include "hostmem.h"

static const int64_t drivers_own = 1 << 30; /* bytes on the GPU for each process */

static int64_t free_memory(const struct cuda_shared *shared, const struct cuda_nvml *nvml, size_t i)
{
    return cuda_nvml_free_memory(nvml, &shared->gpus[i].uuid);
}

void cuda_note_memory(struct cuda_shared *shared, const struct cuda_nvml *nvml, bool after)
{
    int64_t most = 0;
    for (size_t i = 0; i < shared->count; i++)
        if (shared->tasks[i].memory >= 0)
            most += shared->tasks[i].memory + drivers_own;
    for (size_t i = 0; i < shared->gpu_count; i++) {
        struct cuda_gpu *gpu = &shared->gpus[i];
        int64_t now = free_memory(shared, nvml, i);
        int64_t more = now - gpu->free_before;
        if (!after)
            gpu->free_before = now;
        else if (now >= 0 && gpu->free_before >= 0)
            gpu->released = more < 0 ? 0 : more < most ? more : most;
    }
}

bool cuda_has_room(const struct cuda_shared *shared, const struct cuda_nvml *nvml)
{
    for (size_t i = 0; i < shared->gpu_count; i++) {
        int64_t need = shared->gpus[i].released;
        for (size_t k = 0; k < shared->need_count; k++)
            if (memcmp(&shared->needs[k].uuid, &shared->gpus[i].uuid, sizeof(struct cuda_uuid)) == 0)
                need = (int64_t)shared->needs[k].bytes;
        int64_t now = need > 0 ? free_memory(shared, nvml, i) : -1;
        if (now >= 0 && need > now)
            return false;
    }
    return true;
}

bool cuda_check_host(struct cuda_shared *shared, const struct cuda_nvml *nvml)
{
    int64_t need = 0;
    pid_t pid = 0;
    for (size_t i = 0; i < shared->count; i++)
        for (size_t k = 0; shared->tasks[i].found != CUDA_NONE && k < shared->gpu_count; k++) {
            pid = shared->tasks[i].pid;
            need += cuda_nvml_used_by(nvml, &shared->gpus[k].uuid, pid);
        }
    int64_t there = need > 0 ? hostmem_available("", pid) : -1;
    return there < 0 || need <= there ||
           kc_fail(&shared->result, KC_NO_MEMORY,
                   "The GPU's memory (%lld MiB) does not fit into the memory of the host, of which %lld "
                   "MiB are free.",
                   (long long)(need >> 20), (long long)(there >> 20));
}

static bool check_task(struct cuda_shared *shared, const struct cuda_nvml *nvml,
                       const struct cuda_task *task)
{
    if (task->visible_is_cut)
        return kc_fail(&shared->result, KC_GPU_UNSUPPORTED,
                       "CUDA_VISIBLE_DEVICES of process %d has more than %d bytes, which cannot be kept "
                       "with a state: name fewer GPUs, or name them by their indexes.",
                       task->pid, CUDA_VISIBLE_MAX - 1);
    bool mig = strncmp(task->visible, "MIG-", 4) == 0;
    size_t in_mig_mode = 0;
    for (size_t i = 0; i < shared->gpu_count; i++) {
        const struct cuda_uuid *uuid = &shared->gpus[i].uuid;
        if (cuda_nvml_is_on_by_mps(nvml, uuid, task->pid))
            return kc_fail(&shared->result, KC_GPU_UNSUPPORTED,
                           "Process %d uses its GPU through MPS, and the driver cannot save that.",
                           task->pid);
        if (!cuda_nvml_mig(nvml, uuid))
            continue;
        in_mig_mode++;
        mig = mig || cuda_nvml_is_on(nvml, uuid, task->pid);
    }
    /* In a container the processes may be known by other numbers. */
    mig = mig || (shared->gpu_count > 0 && in_mig_mode == shared->gpu_count);
    return !mig || kc_fail(&shared->result, KC_GPU_UNSUPPORTED,
                           "Process %d uses a GPU in MIG mode, and the driver cannot save that.",
                           task->pid);
}

bool cuda_check_tasks(struct cuda_shared *shared, const struct cuda_nvml *nvml)
{
    for (size_t i = 0; i < shared->count; i++)
        if (shared->tasks[i].found != CUDA_NONE && !check_task(shared, nvml, &shared->tasks[i]))
            return false;
    return true;
}

bool cuda_check_map(struct cuda_shared *shared)
{
    return shared->pair_count == 0 || shared->version >= CUDA_PAIRS_SINCE ||
           kc_fail(&shared->result, KC_GPU_UNSUPPORTED,
                   "The NVIDIA driver here (CUDA %d.%d) cannot restore onto another GPU: CUDA 13.0, "
                   "which driver 580 has, is needed.",
                   shared->version / 1000, shared->version % 1000 / 10);
}

bool cuda_folder_fits(struct cuda_shared *shared, const struct cuda_nvml *nvml, int folder)
{
    uint64_t need = 0;
    uint64_t most = 0;
    bool known = true;
    for (size_t k = 0; k < shared->gpu_count; k++)
        most += shared->gpus[k].memory;
    for (size_t i = 0; i < shared->count; i++) {
        struct cuda_task *task = &shared->tasks[i];
        if (task->found != CUDA_RUNNING && task->found != CUDA_LOCKED)
            continue;
        task->expected = 0;
        for (size_t k = 0; k < shared->gpu_count; k++)
            task->expected += cuda_nvml_used_by(nvml, &shared->gpus[k].uuid, task->pid);
        need += (uint64_t)task->expected;
        known = known && task->expected > 0;
    }
    return cuda_storage_room(folder, known ? need : most);
}
