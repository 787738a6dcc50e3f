/* SPDX-License-Identifier: BSD-3-Clause */
/* What is looked at before anything is touched, with NVML's help where it is: whether the driver would refuse
 * it, and whether there is room for what is on the GPUs. What fails is in `shared->result`. */
#ifndef KC_CUDA_CHECKS_H
#define KC_CUDA_CHECKS_H

#include <stdbool.h>

#include "cuda_helper.h"

/* What the driver would refuse of the processes: MPS, MIG. */
bool cuda_check_tasks(struct cuda_shared *shared, const struct cuda_nvml *nvml);
/* Whether this driver can restore onto other GPUs, where that is wanted. */
bool cuda_check_map(struct cuda_shared *shared);
/* The memory comes to the host: a process that is killed for want of it there is lost. */
bool cuda_check_host(struct cuda_shared *shared, const struct cuda_nvml *nvml);
/* Whether the folder has room for all device memory. Without NVML's word on the processes, for all that the GPUs
 * have. */
bool cuda_folder_fits(struct cuda_shared *shared, const struct cuda_nvml *nvml, int folder);
/* How much a checkpoint frees on each GPU. Others may free some meanwhile: so it is at most what came to the
 * host, and what the driver takes for itself. */
void cuda_note_memory(struct cuda_shared *shared, const struct cuda_nvml *nvml, bool after);
/* A restore without room fails for good, so that room is waited for: for what was freed, or what the caller
 * says. */
bool cuda_has_room(const struct cuda_shared *shared, const struct cuda_nvml *nvml);

#endif
