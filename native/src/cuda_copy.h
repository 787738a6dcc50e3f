/* SPDX-License-Identifier: BSD-3-Clause */
/* Device memory that a driver shows, block by block between it and the host, through two buffers. */
#ifndef KC_CUDA_COPY_H
#define KC_CUDA_COPY_H

#include <stdbool.h>
#include <stddef.h>

#include "cuda_tree.h"

enum { CUDA_BLOCK = 16 << 20 };

/* Makes the buffers, once. False: there is no memory for them. */
bool cuda_blocks_make(void);
/* Number 0 or 1. */
unsigned char *cuda_block(int number);
/* The driver makes them its own (pinned) if it can; else it copies more slowly. */
void cuda_blocks_pin(const struct cuda_driver *driver);
/* They stay as they are, because somebody still reads them; others are made when they are needed. */
void cuda_blocks_leave(void);

/* Makes the part's GPU the one that calls are about, and says which it is; all zeros: not known. */
void cuda_enter(const struct cuda_driver *driver, const struct cuda_storage_part *part,
                struct cuda_uuid *uuid);
/* Bytes of the block that begins there. */
size_t cuda_block_size(const struct cuda_storage_part *part, size_t at);
/* Copies one block, again where that fails: what else could be done about it has a worse end. */
int cuda_copy_block(const struct cuda_driver *driver, const struct cuda_storage_part *part, size_t at,
                    size_t size, unsigned char *block, bool to_host);
/* Ends what the driver has begun with a process: that is in the state `expected` then. */
int cuda_complete(const struct cuda_work *work, const struct cuda_task *task,
                  const struct cuda_storage_info *info, int expected);

#endif
