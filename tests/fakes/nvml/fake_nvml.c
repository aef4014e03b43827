/* A libnvidia-ml.so.1 without a driver: the calls that the project makes, answering what a text file says.
 *
 * The file is named by the environment variable FAKE_NVML_FILE and read whole at nvmlInit; its format is described in
 * __init__.py beside this file. A line that it does not understand fails nvmlInit and is named on stderr, so that no test
 * passes by a spelling mistake. Calls check what the real library checks: initialised, a valid handle, the structure's
 * version, the buffer's length. Layouts and codes as in NVIDIA's nvml.h.
 */
#include <ctype.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef unsigned nvmlReturn_t;
enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    INSUFFICIENT_SIZE = 7,
    ARGUMENT_VERSION_MISMATCH = 25,
    UNKNOWN = 999,
};

#define MAX_DEVICES 64
#define MAX_FILE (1 << 20)
#define MIB (1024ull * 1024)

/* What a call does: wait, then answer, fail, hang or crash. */
struct answer {
    enum { GIVE, FAIL, HANG, CRASH } kind;
    unsigned code;
    unsigned delay_ms;
    unsigned long long number[4];
    char text[96];
};

/* What may stand to the right of a key: text, or that many numbers. */
struct shape {
    const char *key;
    unsigned is_text, least, most;
};

enum query { DEVICE, UUID, PCI_BUS_ID, UTILIZATION, MEMORY, TEMPERATURE, POWER, QUERIES };
static const struct shape queries[QUERIES] = {
    {"device", 0, 0, 0}, {"uuid", 1, 0, 0},        {"pci_bus_id", 1, 0, 0}, {"utilization", 0, 2, 2},
    {"memory", 0, 2, 4}, {"temperature", 0, 1, 1}, {"power", 0, 1, 1},
};

enum setting { INIT, SHUTDOWN, COUNT, CC_READY, CC_FEATURE, ERROR_STRING, SETTINGS };
static const struct shape setting_shapes[SETTINGS] = {
    {"init", 0, 0, 0},     {"shutdown", 0, 0, 0},   {"devices", 0, 1, 1},
    {"cc_ready", 0, 1, 1}, {"cc_feature", 0, 1, 1}, {"error_string", 1, 0, 0},
};

struct device {
    struct answer answers[QUERIES];
};

static struct device devices[MAX_DEVICES];
static struct answer settings[SETTINGS];
static unsigned delay_ms;
static int initialised;

static void sleep_ms(unsigned ms)
{
    struct timespec rest = {ms / 1000, (long)(ms % 1000) * 1000000};
    while (nanosleep(&rest, &rest) != 0)
        ;
}

static nvmlReturn_t act(const struct answer *answer)
{
    if (delay_ms + answer->delay_ms)
        sleep_ms(delay_ms + answer->delay_ms);
    switch (answer->kind) {
    case HANG:
        for (;;)
            pause();
    case CRASH:
        signal(SIGSEGV, SIG_DFL);
        raise(SIGSEGV);
        _exit(1);
    case FAIL:
        return answer->code;
    default:
        return SUCCESS;
    }
}

/* ---- the control file ---- */

static char *trim(char *text)
{
    while (isspace((unsigned char)*text))
        text++;
    char *end = text + strlen(text);
    while (end > text && isspace((unsigned char)end[-1]))
        *--end = 0;
    return text;
}

/* The next word of *text, which moves behind it; "" at the end. */
static char *word(char **text)
{
    char *start = *text + strspn(*text, " \t");
    char *end = start + strcspn(start, " \t");
    *text = *end ? end + 1 : end;
    *end = 0;
    return start;
}

static int parse_number(const char *text, unsigned long long *number)
{
    char *end;
    *number = strtoull(text, &end, 0); /* decimal or 0x; -1 is the largest value */
    return *text && !*end;
}

/* Bytes as they stand, but for \n, \\ and \xHH. */
static int parse_text(const char *from, char *to, size_t size)
{
    size_t length = 0;
    while (*from) {
        unsigned value = (unsigned char)*from++;
        if (value == '\\') {
            char kind = *from ? *from++ : 0;
            if (kind == 'n')
                value = '\n';
            else if (kind == 'x' && isxdigit((unsigned char)from[0]) && isxdigit((unsigned char)from[1])) {
                sscanf(from, "%2x", &value);
                from += 2;
            } else if (kind != '\\')
                return 0;
        }
        if (length + 1 >= size)
            return 0;
        to[length++] = (char)value;
    }
    to[length] = 0;
    return 1;
}

static int parse_numbers(char *text, const struct shape *shape, unsigned long long *number)
{
    unsigned given = 0;
    for (char *item = word(&text); *item; item = word(&text))
        if (given == shape->most || !parse_number(item, &number[given++]))
            return 0;
    if (given == 2 && shape->most == 4) /* memory: total used [free [reserved]] */
        number[given++] = number[0] - number[1];
    if (given == 3)
        number[given++] = 0;
    return given > 0 && given >= shape->least;
}

static int parse_answer(char *text, const struct shape *shape, struct answer *answer)
{
    struct answer parsed = *answer;
    unsigned long long number;
    parsed.kind = GIVE;
    parsed.delay_ms = 0;
    if (strncmp(text, "delay ", 6) == 0) {
        text += 6;
        if (!parse_number(word(&text), &number))
            return 0;
        parsed.delay_ms = (unsigned)number;
        text = trim(text);
        if (!*text) { /* late, and then what it would have said */
            parsed.kind = answer->kind;
            *answer = parsed;
            return 1;
        }
    }
    if (strcmp(text, "hang") == 0)
        parsed.kind = HANG;
    else if (strcmp(text, "crash") == 0)
        parsed.kind = CRASH;
    else if (strncmp(text, "error ", 6) == 0) {
        if (!parse_number(trim(text + 6), &number))
            return 0;
        parsed.kind = FAIL;
        parsed.code = (unsigned)number;
    } else if (!(shape->is_text ? parse_text(text, parsed.text, sizeof parsed.text)
                                : parse_numbers(text, shape, parsed.number)))
        return 0;
    *answer = parsed;
    return 1;
}

static int find(const char *key, const struct shape *shapes, int count)
{
    int index = 0;
    while (index < count && strcmp(key, shapes[index].key) != 0)
        index++;
    return index;
}

/* `N.query` is one device, `*.query` all. */
static int parse_device_line(char *key, const char *value)
{
    char *dot = strchr(key, '.');
    *dot = 0;
    int query = find(dot + 1, queries, QUERIES);
    unsigned long long first = 0, last = MAX_DEVICES - 1;
    if (strcmp(key, "*") != 0) {
        if (!parse_number(key, &first) || first > last)
            return 0;
        last = first;
    }
    if (query == QUERIES)
        return 0;
    for (unsigned long long index = first; index <= last; index++) {
        char text[512]; /* parsing cuts its text into words */
        snprintf(text, sizeof text, "%s", value);
        if (!parse_answer(text, &queries[query], &devices[index].answers[query]))
            return 0;
    }
    return 1;
}

static int parse_line(char *key, char *value)
{
    if (strchr(key, '.'))
        return parse_device_line(key, value);
    if (strcmp(key, "delay_ms") == 0) {
        unsigned long long number;
        if (!parse_number(value, &number))
            return 0;
        delay_ms = (unsigned)number;
        return 1;
    }
    int setting = find(key, setting_shapes, SETTINGS);
    return setting < SETTINGS && parse_answer(value, &setting_shapes[setting], &settings[setting]);
}

static void set_defaults(void)
{
    memset(devices, 0, sizeof devices);
    memset(settings, 0, sizeof settings);
    delay_ms = 0;
    settings[CC_READY].number[0] = 1;
    settings[CC_FEATURE].number[0] = 1;
    for (unsigned index = 0; index < MAX_DEVICES; index++) {
        struct answer *answers = devices[index].answers;
        unsigned long long total = 150754820096, reserved = 639 * MIB, used = (20 + index % 8) * 1024 * MIB;
        snprintf(answers[UUID].text, sizeof answers[UUID].text, "GPU-5f0c1e52-8a4d-4b7e-9c36-%012x", index);
        snprintf(answers[PCI_BUS_ID].text, sizeof answers[PCI_BUS_ID].text, "00000000:%02X:00.0", (index + 1) & 0xff);
        answers[UTILIZATION].number[0] = 40 + index % 8;
        answers[UTILIZATION].number[1] = 20 + index % 8;
        answers[MEMORY].number[0] = total;
        answers[MEMORY].number[1] = used;
        answers[MEMORY].number[2] = total - reserved - used;
        answers[MEMORY].number[3] = reserved;
        answers[TEMPERATURE].number[0] = 35 + index % 8;
        answers[POWER].number[0] = 310000 + 1000 * (index % 8);
    }
}

/* Whole, then closed: a writer may rename another file over it at any time. */
static int read_control_file(void)
{
    static char text[MAX_FILE + 1];
    const char *path = getenv("FAKE_NVML_FILE");
    FILE *file = path ? fopen(path, "rb") : NULL;
    if (!file) {
        fprintf(stderr, "fake nvml: FAKE_NVML_FILE names no readable file: %s\n", path ? path : "(unset)");
        return 0;
    }
    size_t length = fread(text, 1, MAX_FILE, file);
    fclose(file);
    text[length] = 0;

    set_defaults();
    unsigned number = 0;
    for (char *line = text, *next; line; line = next) {
        number++;
        next = strchr(line, '\n');
        if (next)
            *next++ = 0;
        line = trim(line);
        if (!*line || *line == '#')
            continue;
        char *equals = strchr(line, '=');
        if (!equals) {
            fprintf(stderr, "fake nvml: line %u is not `key = value`\n", number);
            return 0;
        }
        *equals = 0;
        char *key = trim(line);
        if (!parse_line(key, trim(equals + 1))) {
            fprintf(stderr, "fake nvml: line %u: unknown key or wrong value: %s\n", number, key);
            return 0;
        }
    }
    return 1;
}

/* ---- the library ---- */

static nvmlReturn_t init(void)
{
    if (!read_control_file())
        return UNKNOWN;
    nvmlReturn_t code = act(&settings[INIT]);
    initialised = code == SUCCESS;
    return code;
}

nvmlReturn_t nvmlInit_v2(void)
{
    return init();
}

/* What nvidia-ml-py calls in place of nvmlInit_v2. */
nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return init();
}

nvmlReturn_t nvmlShutdown(void)
{
    if (!initialised)
        return UNINITIALIZED;
    nvmlReturn_t code = act(&settings[SHUTDOWN]);
    initialised = code != SUCCESS;
    return code;
}

/* Needs no nvmlInit, as in the real library. */
const char *nvmlErrorString(nvmlReturn_t code)
{
    if (act(&settings[ERROR_STRING]) != SUCCESS)
        return NULL;
    if (*settings[ERROR_STRING].text)
        return settings[ERROR_STRING].text;
    switch (code) {
    case 0: return "Success";
    case 1: return "Uninitialized";
    case 2: return "Invalid Argument";
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case 5: return "Already Initialized";
    case 6: return "Not Found";
    case 7: return "Insufficient Size";
    case 8: return "Insufficient External Power";
    case 9: return "Driver Not Loaded";
    case 10: return "Timeout";
    case 11: return "Interrupt Request Issue";
    case 12: return "NVML Shared Library Not Found";
    case 13: return "Function Not Found";
    case 14: return "Corrupted infoROM";
    case 15: return "GPU is lost";
    case 16: return "GPU requires reset";
    case 17: return "GPU access blocked by the operating system";
    case 18: return "Driver/library version mismatch";
    case 19: return "In use by another client";
    case 20: return "Insufficient Memory";
    case 21: return "No data";
    case 22: return "The requested vgpu operation is not available on the target device, because ECC is enabled";
    case 23: return "Insufficient Resources";
    case 24: return "Frequency Not Supported";
    case 25: return "Argument Version Mismatch";
    case 26: return "Deprecated";
    case 27: return "Not Ready";
    case 28: return "GPU Not Found";
    case 29: return "Invalid State";
    default: return "Unknown Error";
    }
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    if (!initialised)
        return UNINITIALIZED;
    if (!count)
        return INVALID_ARGUMENT;
    *count = (unsigned)settings[COUNT].number[0];
    return act(&settings[COUNT]);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **device)
{
    if (!initialised)
        return UNINITIALIZED;
    if (!device || index >= settings[COUNT].number[0] || index >= MAX_DEVICES)
        return INVALID_ARGUMENT;
    *device = &devices[index];
    return act(&devices[index].answers[DEVICE]);
}

/* `*answer` is what `device` says to `query`. */
static nvmlReturn_t ask(struct device *device, enum query query, const void *result, const struct answer **answer)
{
    if (!initialised)
        return UNINITIALIZED;
    if (!result || device < devices || device >= devices + MAX_DEVICES)
        return INVALID_ARGUMENT;
    *answer = &device->answers[query];
    return act(*answer);
}

nvmlReturn_t nvmlDeviceGetUUID(struct device *device, char *uuid, unsigned length)
{
    const struct answer *answer;
    nvmlReturn_t code = ask(device, UUID, uuid, &answer);
    if (code != SUCCESS)
        return code;
    if (length <= strlen(answer->text))
        return INSUFFICIENT_SIZE;
    strcpy(uuid, answer->text);
    return SUCCESS;
}

struct pci_info {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

nvmlReturn_t nvmlDeviceGetPciInfo_v3(struct device *device, struct pci_info *pci)
{
    const struct answer *answer;
    nvmlReturn_t code = ask(device, PCI_BUS_ID, pci, &answer);
    if (code != SUCCESS)
        return code;
    memset(pci, 0, sizeof *pci);
    sscanf(answer->text, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->bus_id_legacy, sizeof pci->bus_id_legacy, "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff,
             pci->device & 0xff);
    memcpy(pci->bus_id, answer->text, sizeof pci->bus_id - 1);
    return SUCCESS;
}

struct utilization {
    unsigned gpu, memory;
};

nvmlReturn_t nvmlDeviceGetUtilizationRates(struct device *device, struct utilization *rates)
{
    const struct answer *answer;
    nvmlReturn_t code = ask(device, UTILIZATION, rates, &answer);
    if (code != SUCCESS)
        return code;
    rates->gpu = (unsigned)answer->number[0];
    rates->memory = (unsigned)answer->number[1];
    return SUCCESS;
}

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(struct device *device, struct memory_v2 *memory)
{
    const struct answer *answer;
    nvmlReturn_t code = ask(device, MEMORY, memory, &answer);
    if (code != SUCCESS)
        return code;
    if (memory->version != (sizeof *memory | 2u << 24))
        return ARGUMENT_VERSION_MISMATCH;
    memory->total = answer->number[0];
    memory->used = answer->number[1];
    memory->free = answer->number[2];
    memory->reserved = answer->number[3];
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperature(struct device *device, unsigned sensor, unsigned *celsius)
{
    const struct answer *answer;
    nvmlReturn_t code = ask(device, TEMPERATURE, celsius, &answer);
    if (code != SUCCESS)
        return code;
    if (sensor != 0)
        return INVALID_ARGUMENT;
    *celsius = (unsigned)answer->number[0];
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(struct device *device, unsigned *milliwatts)
{
    const struct answer *answer;
    nvmlReturn_t code = ask(device, POWER, milliwatts, &answer);
    if (code == SUCCESS)
        *milliwatts = (unsigned)answer->number[0];
    return code;
}

static nvmlReturn_t read_setting(enum setting setting, unsigned *value)
{
    if (!initialised)
        return UNINITIALIZED;
    if (!value)
        return INVALID_ARGUMENT;
    nvmlReturn_t code = act(&settings[setting]);
    if (code == SUCCESS)
        *value = (unsigned)settings[setting].number[0];
    return code;
}

nvmlReturn_t nvmlSystemGetConfComputeGpusReadyState(unsigned *accepting)
{
    return read_setting(CC_READY, accepting);
}

struct conf_compute_state {
    unsigned environment, cc_feature, dev_tools_mode;
};

nvmlReturn_t nvmlSystemGetConfComputeState(struct conf_compute_state *state)
{
    if (!state)
        return INVALID_ARGUMENT;
    state->environment = 2; /* production */
    state->dev_tools_mode = 0;
    return read_setting(CC_FEATURE, &state->cc_feature);
}
