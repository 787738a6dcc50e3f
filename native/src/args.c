/* SPDX-License-Identifier: BSD-3-Clause */
#include "args.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_driver.h"

const char args_usage[] =
    "usage: kernel-capture probe\n"
    "       kernel-capture run --log FILE [--env-fd N] -- COMMAND...\n"
    "       kernel-capture dump --pid PID --images-dir DIR [--timeout S] [--ghost-limit BYTES]\n"
    "                      [--leave running|stopped|killed] [--window-dir DIR]...\n"
    "                      [--window-timeout S] [--gpu-timeout S] [--gpu-to-store] [--parked]\n"
    "       kernel-capture restore --images-dir DIR [--pids-file FILE] [--timeout S]\n"
    "                      [--hold] [--hold-timeout S] [--pid-namespace auto|never|always]\n"
    "                      [--stream] [--gpu-map OLD=NEW]... [--gpu-timeout S]\n"
    "       kernel-capture park --pid PID [--timeout S] [--gpu-timeout S]\n"
    "       kernel-capture unpark --pid PID [--gpu-map OLD=NEW]... [--gpu-need UUID=BYTES]...\n"
    "                      [--timeout S] [--gpu-timeout S]\n"
    "       kernel-capture --version | --help\n";

static const double shortest = 0.001; /* what the clock of a wait counts */
static const double longest = 7.0 * 24 * 3600; /* seconds that any deadline may be away */

enum option {
    OPT_LOG,
    OPT_ENV_FD,
    OPT_PID,
    OPT_IMAGES_DIR,
    OPT_PIDS_FILE,
    OPT_TIMEOUT,
    OPT_GHOST_LIMIT,
    OPT_LEAVE,
    OPT_WINDOW_DIR,
    OPT_WINDOW_TIMEOUT,
    OPT_HOLD,
    OPT_HOLD_TIMEOUT,
    OPT_PID_NAMESPACE,
    OPT_STREAM,
    OPT_GPU_TIMEOUT,
    OPT_GPU_MAP,
    OPT_GPU_NEED,
    OPT_GPU_TO_STORE,
    OPT_PARKED,
};

enum {
    RUN = 1u << ARGS_RUN,
    DUMP = 1u << ARGS_DUMP,
    RESTORE = 1u << ARGS_RESTORE,
    PARK = 1u << ARGS_PARK,
    UNPARK = 1u << ARGS_UNPARK,
};

static const struct {
    const char *name;
    enum option option;
    bool value;
    unsigned commands; /* bit set of args_command */
} options[] = {
    {"--log", OPT_LOG, true, RUN},
    {"--env-fd", OPT_ENV_FD, true, RUN},
    {"--pid", OPT_PID, true, DUMP | PARK | UNPARK},
    {"--images-dir", OPT_IMAGES_DIR, true, DUMP | RESTORE},
    {"--pids-file", OPT_PIDS_FILE, true, RESTORE},
    {"--timeout", OPT_TIMEOUT, true, DUMP | RESTORE | PARK | UNPARK},
    {"--ghost-limit", OPT_GHOST_LIMIT, true, DUMP},
    {"--leave", OPT_LEAVE, true, DUMP},
    {"--window-dir", OPT_WINDOW_DIR, true, DUMP},
    {"--window-timeout", OPT_WINDOW_TIMEOUT, true, DUMP},
    {"--hold", OPT_HOLD, false, RESTORE},
    {"--hold-timeout", OPT_HOLD_TIMEOUT, true, RESTORE},
    {"--pid-namespace", OPT_PID_NAMESPACE, true, RESTORE},
    {"--stream", OPT_STREAM, false, RESTORE},
    {"--gpu-timeout", OPT_GPU_TIMEOUT, true, DUMP | RESTORE | PARK | UNPARK},
    {"--gpu-map", OPT_GPU_MAP, true, RESTORE | UNPARK},
    {"--gpu-need", OPT_GPU_NEED, true, UNPARK},
    {"--gpu-to-store", OPT_GPU_TO_STORE, false, DUMP},
    {"--parked", OPT_PARKED, false, DUMP},
};

static bool parse_unsigned(const char *text, uint64_t most, uint64_t *out)
{
    char *end;
    errno = 0;
    if (isdigit((unsigned char)text[0]) == 0)
        return false;
    unsigned long long value = strtoull(text, &end, 10);
    if (*end != '\0' || errno != 0 || value > most)
        return false;
    *out = value;
    return true;
}

static bool parse_seconds(const char *text, double *out)
{
    /* Digits and at most one point: no exponents, no "inf", no locale. */
    size_t whole = strspn(text, "0123456789");
    size_t length = whole;
    if (text[length] == '.') {
        size_t part = strspn(text + length + 1, "0123456789");
        length += part > 0 ? 1 + part : 0;
    }
    if (whole == 0 || text[length] != '\0' || length > 32)
        return false;
    double value = strtod(text, NULL);
    if (!isfinite(value) || value < shortest || value > longest)
        return false;
    *out = value;
    return true;
}

static bool parse_word(const char *text, const char *const *words, unsigned count, unsigned *out)
{
    for (unsigned i = 0; i < count; i++)
        if (strcmp(text, words[i]) == 0) {
            *out = i;
            return true;
        }
    return false;
}

/* OLD=NEW, two UUIDs; an old one only once. */
static bool parse_gpu_map(const char *text, struct args *args)
{
    struct cuda_gpu_pair pair;
    if (args->gpu_map_count == ARGS_GPU_MAP_MAX || !cuda_parse_uuid(text, '=', &pair.from) ||
        text[CUDA_UUID_TEXT - 1] != '=' || !cuda_parse_uuid(text + CUDA_UUID_TEXT, '\0', &pair.to))
        return false;
    for (size_t i = 0; i < args->gpu_map_count; i++)
        if (memcmp(&args->gpu_map[i].from, &pair.from, sizeof(pair.from)) == 0)
            return false;
    args->gpu_map[args->gpu_map_count++] = pair;
    return true;
}

/* UUID=BYTES */
static bool parse_gpu_need(const char *text, struct args *args)
{
    struct cuda_gpu_need *need = &args->gpu_needs[args->gpu_need_count];
    if (args->gpu_need_count == ARGS_GPU_MAP_MAX || !cuda_parse_uuid(text, '=', &need->uuid) ||
        text[CUDA_UUID_TEXT - 1] != '=' ||
        !parse_unsigned(text + CUDA_UUID_TEXT, INT64_MAX, &need->bytes))
        return false;
    args->gpu_need_count++;
    return true;
}

static bool apply(struct args *args, enum option option, const char *value)
{
    static const char *const leaves[] = {"running", "stopped", "killed"};
    static const char *const namespaces[] = {"auto", "never", "always"};
    uint64_t number;
    unsigned word;
    switch (option) {
    case OPT_LOG:
        args->log = value;
        return *value != '\0';
    case OPT_ENV_FD:
        if (!parse_unsigned(value, 1 << 20, &number) || number < 3)
            return false;
        args->env_fd = (int)number;
        return true;
    case OPT_PID:
        if (!parse_unsigned(value, INT_MAX, &number) || number < 2)
            return false;
        args->pid = (pid_t)number;
        return true;
    case OPT_IMAGES_DIR:
        args->images_dir = value;
        return *value != '\0';
    case OPT_PIDS_FILE:
        args->pids_file = value;
        return *value != '\0';
    case OPT_TIMEOUT:
        return parse_seconds(value, &args->timeout);
    case OPT_GHOST_LIMIT:
        return parse_unsigned(value, UINT32_MAX, &args->ghost_limit);
    case OPT_LEAVE:
        if (!parse_word(value, leaves, 3, &word))
            return false;
        args->leave = (enum args_leave)word;
        return true;
    case OPT_WINDOW_DIR:
        if (args->window_dir_count == ARGS_WINDOW_DIRS_MAX || *value != '/')
            return false;
        args->window_dirs[args->window_dir_count++] = value;
        return true;
    case OPT_WINDOW_TIMEOUT:
        return parse_seconds(value, &args->window_timeout);
    case OPT_HOLD:
        args->hold = true;
        return true;
    case OPT_HOLD_TIMEOUT:
        return parse_seconds(value, &args->hold_timeout);
    case OPT_PID_NAMESPACE:
        if (!parse_word(value, namespaces, 3, &word))
            return false;
        args->pid_namespace = (enum args_pidns)word;
        return true;
    case OPT_STREAM:
        args->stream = true;
        return true;
    case OPT_GPU_TIMEOUT:
        return parse_seconds(value, &args->gpu_timeout);
    case OPT_GPU_MAP:
        return parse_gpu_map(value, args);
    case OPT_GPU_NEED:
        return parse_gpu_need(value, args);
    case OPT_GPU_TO_STORE:
        args->gpu_to_store = true;
        return true;
    case OPT_PARKED:
        args->parked = true;
        return true;
    }
    return false;
}

static bool parse_command(const char *word, enum args_command *out)
{
    static const char *const words[] = {"probe", "run",    "dump",      "restore",
                                        "park",  "unpark", "--version", "--help"};
    unsigned index;
    if (!parse_word(word, words, sizeof(words) / sizeof(words[0]), &index))
        return false;
    *out = (enum args_command)index;
    return true;
}

static bool check_complete(const struct args *args, struct kc_result *result)
{
    if (args->command == ARGS_RUN && (args->log == NULL || args->program == NULL))
        return kc_fail(result, KC_USAGE, "run needs --log FILE and -- COMMAND.");
    if (args->command == ARGS_DUMP && (args->pid == 0 || args->images_dir == NULL))
        return kc_fail(result, KC_USAGE, "dump needs --pid PID and --images-dir DIR.");
    if (args->command == ARGS_RESTORE && args->images_dir == NULL)
        return kc_fail(result, KC_USAGE, "restore needs --images-dir DIR.");
    if ((args->command == ARGS_PARK || args->command == ARGS_UNPARK) && args->pid == 0)
        return kc_fail(result, KC_USAGE, "park and unpark need --pid PID.");
    return true;
}

bool args_parse(int argc, char **argv, struct args *args, struct kc_result *result)
{
    *args = (struct args){
        .env_fd = -1,
        .timeout = 600.0,
        .window_timeout = 60.0,
        .hold_timeout = 10.0,
        .ghost_limit = 1 << 20,
        .gpu_timeout = 30.0,
    };
    if (argc < 2 || !parse_command(argv[1], &args->command))
        return kc_fail(result, KC_USAGE, "The first argument must be a command.");
    for (int i = 2; i < argc; i++) {
        const char *arg = argv[i];
        if (strcmp(arg, "--") == 0) {
            if (args->command != ARGS_RUN || i + 1 >= argc)
                return kc_fail(result, KC_USAGE, "Nothing may follow -- here.");
            args->program = argv + i + 1;
            break;
        }
        size_t name = strcspn(arg, "=");
        size_t found = sizeof(options) / sizeof(options[0]);
        for (size_t k = 0; k < sizeof(options) / sizeof(options[0]); k++)
            if (strlen(options[k].name) == name && strncmp(options[k].name, arg, name) == 0 &&
                (options[k].commands & 1u << args->command) != 0)
                found = k;
        if (found == sizeof(options) / sizeof(options[0]))
            return kc_fail(result, KC_USAGE, "%.100s is not an option of %s.", arg, argv[1]);
        const char *value = arg[name] == '=' ? arg + name + 1 : NULL;
        if (options[found].value && value == NULL && i + 1 < argc)
            value = argv[++i];
        if (options[found].value != (value != NULL) ||
            !apply(args, options[found].option, value))
            return kc_fail(result, KC_USAGE, "The value of %s is not valid.",
                           options[found].name);
    }
    return check_complete(args, result);
}
