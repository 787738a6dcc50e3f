/* SPDX-License-Identifier: BSD-3-Clause */
/* A driver of the tests' own, in which anything may fail. */
#ifndef KC_FAKE_DRIVER_H
#define KC_FAKE_DRIVER_H

#include <stddef.h>

#include "cuda_tree.h"

enum { PROCESSES = 3, FIRST = 100, CALLS = 512, HANG = -1, CRASH = -2,
       FLOOD = -3, NONSENSE = -4, SHORT = -5 };

/* In memory that the helper has too. */
struct fake {

    int pid[PROCESSES];
    int state[PROCESSES];
    char calls[CALLS]; /* what was called, one letter each, and of which process */
    size_t count;
    char fail; /* this letter fails... */
    size_t at; /* ...for this process... */
    int times; /* ...so many times, -1: always... */
    int with;  /* ...with this error... */
    int then;  /* ...and after them with this one */
    int init;
    int slow_ms; /* so long it takes to copy memory, each time */
};
extern struct fake *fake;

void fake_make(void);
/* Processes FIRST and later, that run. */
void fake_reset(void);
void fake_fail(char letter, size_t at, int times, int with);
enum cuda_load fake_load(struct cuda_driver *driver);
/* PROCESSES when there is no such process. */
size_t fake_find(int pid);

#endif
