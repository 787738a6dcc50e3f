/* SPDX-License-Identifier: BSD-3-Clause */
/* The file of one process's device memory, made and written by a thread of its own: a folder that is slow, or
 * hangs, holds up nobody who can do without it. */
#ifndef KC_CUDA_FILE_H
#define KC_CUDA_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Opens the file of a process that is in the folder; `end` is what its name ends with. */
int cuda_file_open(int folder, pid_t pid, const char *end, int flags);

struct cuda_file;

/* Starts the thread; NULL where that cannot be. */
struct cuda_file *cuda_file_start(int folder, pid_t pid);

/* What it is asked for, one thing after the other: cuda_file_wait() tells when it is done. */

/* A new one, in place of what is there, with room for so many bytes: that there is none is an error. */
void cuda_file_create(struct cuda_file *file, uint64_t bytes);
/* Takes room beforehand, where that can be. */
void cuda_file_reserve(struct cuda_file *file, uint64_t bytes);
/* `data` stays as it is until that is done. */
void cuda_file_write(struct cuda_file *file, const void *data, size_t size, uint64_t at);
/* All that was written is on the disk. */
void cuda_file_sync(struct cuda_file *file);
/* The list of what is in it, a file of its own. The text is copied. */
void cuda_file_list(struct cuda_file *file, const char *text);
void cuda_file_remove(struct cuda_file *file);

/* Waits at most that many ms. False: it is still at work. */
bool cuda_file_wait(struct cuda_file *file, int ms);
/* Of what was done last: 0, or an errno value. */
int cuda_file_error(const struct cuda_file *file);
/* For reading, while nothing is done. */
int cuda_file_fd(const struct cuda_file *file);
/* Takes leave of it: it is closed when it is done with what it does. True: it still reads `data`. */
bool cuda_file_leave(struct cuda_file *file);

#endif
