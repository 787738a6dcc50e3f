// SPDX-License-Identifier: BSD-3-Clause
#include "faults.h"

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "wire.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char function[64];
    unsigned long calls;
} counters[128];
static _Thread_local int after;

static unsigned long count(const char *function)
{
    unsigned long calls = 0;
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; i < sizeof(counters) / sizeof(*counters); i++) {
        if (counters[i].calls == 0)
            snprintf(counters[i].function, sizeof(counters[i].function), "%s", function);
        if (strcmp(counters[i].function, function) == 0) {
            calls = ++counters[i].calls;
            break;
        }
    }
    pthread_mutex_unlock(&mutex);
    return calls;
}

// "3" the third call, "3+" it and all later ones, "*" every call.
static bool matches(const char *which, unsigned long call)
{
    char *end;
    unsigned long number = strtoul(which, &end, 10);
    return *which == '*' || call == number || (*end == '+' && call > number);
}

static void sleep_ms(unsigned long ms)
{
    struct timespec left = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000L};
    while (nanosleep(&left, &left) < 0) {
    }
}

// Functions are named without the version that the library's symbols carry ("_v2").
static void base_name(const char *symbol, char function[64])
{
    snprintf(function, 64, "%s", symbol);
    size_t length = strlen(function);
    if (length > 3 && function[length - 3] == '_' && function[length - 2] == 'v')
        function[length - 3] = '\0';
}

int sim_fault(const char *symbol)
{
    char function[64];
    base_name(symbol, function);
    unsigned long call = count(function);
    after = 0;
    char folder[SIM_FOLDER], path[SIM_FOLDER + 16], line[256];
    sim_machine_folder(folder);
    snprintf(path, sizeof(path), "%s/faults", folder);
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    int result = 0;
    while (result == 0 && fgets(line, sizeof(line), file)) {
        char name[64], which[16], action[16];
        unsigned long number = 0;
        if (sscanf(line, "%63s %15s %15s %lu", name, which, action, &number) < 3 ||
            strcmp(name, function) != 0 || !matches(which, call))
            continue;
        if (strcmp(action, "error") == 0) {
            result = (int)number;
        } else if (strcmp(action, "after") == 0) {
            after = (int)number;
        } else if (strcmp(action, "delay") == 0) {
            sleep_ms(number);
        } else if (strcmp(action, "fail") == 0) {
            result = SIM_FAULT_FAIL;
        } else if (strcmp(action, "kill") == 0) {
            raise(SIGKILL);
        } else if (strcmp(action, "hang") == 0) {
            for (;;)
                sleep_ms(1000000);
        } else {
            fprintf(stderr, "simgpu: %s: no such action: %s\n", path, action);
            abort();
        }
    }
    fclose(file);
    return result;
}

int sim_fault_after(int result)
{
    int other = after;
    after = 0;
    return other && result == 0 ? other : result;
}
