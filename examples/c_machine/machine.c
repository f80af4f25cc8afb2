/* A small int8 machine in C99, which runs a vector bundle of the FX Quantization Conformance Suite.
 *
 *     machine DEVICE OUT [CASE...]
 *
 * reads DEVICE/manifest.json, and of each case (or of those that are named) its model, weights and inputs. It writes
 * the integers of each output to OUT/CASE/r<run>_o<output>.int8, and what it executed to OUT/CASE/execution.json. A
 * model that it does not run is declined in OUT/CASE/status.json.
 *
 * From the integers of the inputs to those of the outputs there are integers only: int8 tensors and weights, int32
 * sums and biases, and a product with a multiplier of 31 bits, in int64, which a shift rounds half up. Doubles appear
 * where a model is loaded: they make multipliers, shifts, int32 biases and the tables of functions such as the sigmoid;
 * and where an input is given as values that lie on no grid, the host's part is to quantize them.
 *
 * Everything is C99 but mkdir, which is POSIX. With -DBUG=1 to -DBUG=8 the machine has a fault (README.md). */

#define _POSIX_C_SOURCE 200809L

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#ifndef BUG
#define BUG 0
#endif

enum {
    MOST_AXES = 8,
    MOST_INPUTS = 16,
    MOST_PRODUCTS = 65536, /* in an int32 sum: each is at most 255 * 128 */
    MOST_DEPTH = 64,       /* of JSON */
    FRACTION = 20,         /* bits below the point of the steps to which summands are brought */
    LOWEST = -128,
    HIGHEST = 127
};

/* -- faults, and memory ------------------------------------------------------------------------------------------- */

/* Ends the program: the bundle is not what it should be, or nothing can be written. */
static void fail(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    fputs("machine: ", stderr);
    vfprintf(stderr, format, values);
    fputc('\n', stderr);
    va_end(values);
    exit(2);
}

static jmp_buf on_decline;
static char reason[512];

/* Leaves the case: the machine does not do this. */
static void decline(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    vsnprintf(reason, sizeof reason, format, values);
    va_end(values);
    longjmp(on_decline, 1);
}

/* Memory is taken piece by piece, and given back down to a mark: that of a run, or of a case. */
typedef union Piece {
    union Piece *below;
    int64_t integer;
    double number;
} Piece;

static Piece *newest;

/* Returns memory of zeros for `count` things of a size. */
static void *take(size_t count, size_t size)
{
    Piece *piece;
    if (size != 0 && count > (SIZE_MAX - sizeof(Piece)) / size)
        fail("%zu things of %zu bytes are too many", count, size);
    piece = calloc(1, sizeof(Piece) + count * size);
    if (piece == NULL)
        fail("no memory for %zu bytes", count * size);
    piece->below = newest;
    newest = piece;
    return piece + 1;
}

static void give_back(Piece *mark)
{
    while (newest != mark) {
        Piece *below = newest->below;
        free(newest);
        newest = below;
    }
}

/* Returns a text made as by printf. */
static char *spell(const char *format, ...)
{
    va_list values;
    char *text;
    int length;
    va_start(values, format);
    length = vsnprintf(NULL, 0, format, values);
    va_end(values);
    text = take((size_t)length + 1, 1);
    va_start(values, format);
    vsnprintf(text, (size_t)length + 1, format, values);
    va_end(values);
    return text;
}

typedef struct {
    const char *path;
    unsigned char *bytes; /* a zero follows */
    size_t size;
} File;

static File read_file(const char *path)
{
    File file = {path, NULL, 0};
    FILE *stream = fopen(path, "rb");
    long size;
    if (stream == NULL)
        fail("%s: %s", path, strerror(errno));
    if (fseek(stream, 0, SEEK_END) != 0 || (size = ftell(stream)) < 0 || fseek(stream, 0, SEEK_SET) != 0)
        fail("%s: its size is not known", path);
    file.size = (size_t)size;
    file.bytes = take(file.size + 1, 1);
    if (fread(file.bytes, 1, file.size, stream) != file.size)
        fail("%s: cannot be read", path);
    fclose(stream);
    return file;
}

static void write_file(const char *path, const void *bytes, size_t size)
{
    FILE *stream = fopen(path, "wb");
    if (stream == NULL || fwrite(bytes, 1, size, stream) != size || fclose(stream) != 0)
        fail("%s: cannot be written: %s", path, strerror(errno));
}

/* -- JSON --------------------------------------------------------------------------------------------------------- */

typedef enum { NOTHING, TRUTH, NUMBER, TEXT, LIST, OBJECT } Kind;

/* A value. The items of a list, and the members of an object, are chained by `next`. */
typedef struct Json {
    Kind kind;
    const char *key; /* of a member */
    const char *text;
    double number; /* of TRUTH: 0 or 1 */
    struct Json *first, *next;
    int count;
} Json;

typedef struct {
    const char *path, *at;
} Reader;

static void skip_spaces(Reader *reader)
{
    reader->at += strspn(reader->at, " \t\r\n");
}

static void expect(Reader *reader, const char *word)
{
    if (strncmp(reader->at, word, strlen(word)) != 0)
        fail("%s: no JSON: expected %s at \"%.20s\"", reader->path, word, reader->at);
    reader->at += strlen(word);
}

/* Writes a code point as UTF-8; returns where the text goes on. */
static char *put_code(char *end, unsigned code)
{
    if (code < 0x80) {
        *end++ = (char)code;
    } else if (code < 0x800) {
        *end++ = (char)(0xC0 | code >> 6);
        *end++ = (char)(0x80 | (code & 0x3F));
    } else {
        *end++ = (char)(0xE0 | code >> 12);
        *end++ = (char)(0x80 | (code >> 6 & 0x3F));
        *end++ = (char)(0x80 | (code & 0x3F));
    }
    return end;
}

static const char *read_text(Reader *reader)
{
    static const char escapes[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    char *text, *end;
    size_t length = 0;
    expect(reader, "\"");
    while (reader->at[length] != '"' && reader->at[length] != '\0')
        length += reader->at[length] == '\\' && reader->at[length + 1] != '\0' ? 2 : 1;
    text = end = take(length + 1, 1); /* an escape is never shorter than what it stands for */
    while (*reader->at != '"') {
        const char *escape;
        unsigned code;
        if (*reader->at == '\0')
            fail("%s: no JSON: a text without end", reader->path);
        if (*reader->at != '\\') {
            *end++ = *reader->at++;
        } else if (reader->at[1] == 'u' && sscanf(reader->at + 2, "%4x", &code) == 1) {
            end = put_code(end, code);
            reader->at += 6;
        } else if (reader->at[1] != '\0' && (escape = strchr(escapes, reader->at[1])) != NULL) {
            *end++ = meanings[escape - escapes];
            reader->at += 2;
        } else {
            fail("%s: no JSON: an escape \"%.6s\"", reader->path, reader->at);
        }
    }
    reader->at++;
    return text;
}

static Json *read_value(Reader *reader, int depth);

/* Reads what stands between brackets: items, or members with keys. */
static void read_items(Reader *reader, Json *value, char close, int depth)
{
    Json **end = &value->first;
    reader->at++;
    skip_spaces(reader);
    while (*reader->at != close) {
        const char *key = NULL;
        if (value->count > 0)
            expect(reader, ",");
        skip_spaces(reader);
        if (value->kind == OBJECT) {
            key = read_text(reader);
            skip_spaces(reader);
            expect(reader, ":");
        }
        *end = read_value(reader, depth + 1);
        (*end)->key = key;
        end = &(*end)->next;
        value->count++;
        skip_spaces(reader);
    }
    reader->at++;
}

static Json *read_value(Reader *reader, int depth)
{
    Json *value = take(1, sizeof(Json));
    if (depth > MOST_DEPTH)
        fail("%s: JSON of more than %d levels", reader->path, MOST_DEPTH);
    skip_spaces(reader);
    switch (*reader->at) {
    case '{':
        value->kind = OBJECT;
        read_items(reader, value, '}', depth);
        break;
    case '[':
        value->kind = LIST;
        read_items(reader, value, ']', depth);
        break;
    case '"':
        value->kind = TEXT;
        value->text = read_text(reader);
        break;
    case 't':
    case 'f':
        value->kind = TRUTH;
        value->number = *reader->at == 't';
        expect(reader, *reader->at == 't' ? "true" : "false");
        break;
    case 'n':
        value->kind = NOTHING;
        expect(reader, "null");
        break;
    default: {
        char *end;
        value->kind = NUMBER;
        value->number = strtod(reader->at, &end);
        if (end == reader->at)
            fail("%s: no JSON at \"%.20s\"", reader->path, reader->at);
        reader->at = end;
    }
    }
    return value;
}

static Json *read_json(const char *path)
{
    File file = read_file(path);
    Reader reader = {path, (const char *)file.bytes};
    return read_value(&reader, 0);
}

/* Returns a member of an object, or NULL; also for what is no object, and for null. */
static const Json *find(const Json *object, const char *key)
{
    const Json *member = object != NULL && object->kind == OBJECT ? object->first : NULL;
    while (member != NULL && strcmp(member->key, key) != 0)
        member = member->next;
    return member == NULL || member->kind == NOTHING ? NULL : member;
}

static const Json *need(const Json *object, const char *key, Kind kind)
{
    const Json *member = find(object, key);
    if (member == NULL || member->kind != kind)
        fail("the bundle: \"%s\" is missing, or not what it should be", key);
    return member;
}

static const char *need_text(const Json *object, const char *key)
{
    return need(object, key, TEXT)->text;
}

/* Returns a whole number. */
static int32_t as_int(const Json *value, const char *what)
{
    if (value->kind != NUMBER || floor(value->number) != value->number || fabs(value->number) > INT32_MAX)
        decline("%s is no whole number", what);
    return (int32_t)value->number;
}

/* -- tensors in files --------------------------------------------------------------------------------------------- */

typedef struct {
    int rank;
    int32_t sizes[MOST_AXES];
} Shape;

static size_t count_elements(const Shape *shape)
{
    size_t count = 1;
    int axis;
    for (axis = 0; axis < shape->rank; axis++)
        count *= (size_t)shape->sizes[axis];
    return count;
}

/* An array of a .npz file: its elements, little-endian and in C order, of `width` bytes each. */
typedef struct {
    char type; /* as NumPy has it: 'i' or 'f' */
    int width;
    Shape shape;
    const unsigned char *bytes;
} Array;

/* Returns `width` bytes, of which the first is the lowest. */
static uint64_t read_bytes(const unsigned char *bytes, int width)
{
    uint64_t value = 0;
    while (width-- > 0)
        value = value << 8 | bytes[width];
    return value;
}

static int8_t to_int8(unsigned char byte)
{
    return (int8_t)(byte < 128 ? byte : byte - 256);
}

/* Reads the header of a .npy member: its dtype, its order and its shape. */
static Array read_npy(const unsigned char *bytes, size_t size, const char *name)
{
    Array array = {0, 0, {0, {0}}, NULL};
    size_t start, length;
    char *header, *at;
    char order;
    if (size < 10 || memcmp(bytes, "\x93NUMPY", 6) != 0 || bytes[6] != 1)
        fail("%s is no .npy of version 1", name);
    length = (size_t)read_bytes(bytes + 8, 2);
    start = 10 + length;
    if (start > size)
        fail("%s: the header is longer than the file", name);
    header = take(length + 1, 1);
    memcpy(header, bytes + 10, length);
    at = strstr(header, "'descr': '");
    if (at == NULL || sscanf(at, "'descr': '%c%c%d'", &order, &array.type, &array.width) != 3 || order == '>')
        fail("%s: a dtype that this reader does not know: %s", name, header);
    if (strstr(header, "'fortran_order': False") == NULL || (at = strstr(header, "'shape': (")) == NULL)
        fail("%s: not in C order: %s", name, header);
    for (at += strlen("'shape': ("); *at != ')'; at += strspn(at, ", ")) {
        long extent = strtol(at, &at, 10);
        if (array.shape.rank == MOST_AXES || extent < 0 || extent > INT32_MAX || strchr(",)", *at) == NULL || !*at)
            fail("%s: a shape that this reader does not know: %s", name, header);
        array.shape.sizes[array.shape.rank++] = (int32_t)extent;
    }
    array.bytes = bytes + start;
    if (count_elements(&array.shape) * (size_t)array.width != size - start)
        fail("%s: %zu bytes do not fit its shape", name, size - start);
    return array;
}

/* Finds an array in a .npz: a zip file whose members are stored as they are, listed at its end. */
static Array find_array(const File *zip, const char *key)
{
    const char *name = spell("%s.npy", key);
    size_t end = zip->size < 22 ? 0 : zip->size - 22, at, left;
    while (end > 0 && read_bytes(zip->bytes + end, 4) != 0x06054b50)
        end--;
    left = end == 0 ? 0 : (size_t)read_bytes(zip->bytes + end + 10, 2);
    at = end == 0 ? 0 : (size_t)read_bytes(zip->bytes + end + 16, 4);
    for (; left > 0 && at + 46 <= zip->size && read_bytes(zip->bytes + at, 4) == 0x02014b50; left--) {
        const unsigned char *entry = zip->bytes + at;
        size_t size = (size_t)read_bytes(entry + 24, 4), length = (size_t)read_bytes(entry + 28, 2);
        size_t start = (size_t)read_bytes(entry + 42, 4);
        if (at + 46 + length > zip->size)
            break;
        if (length == strlen(name) && memcmp(entry + 46, name, length) == 0) {
            if (read_bytes(entry + 10, 2) != 0)
                fail("%s: %s is compressed", zip->path, name);
            if (start + 30 <= zip->size)
                start += 30 + (size_t)(read_bytes(zip->bytes + start + 26, 2) + read_bytes(zip->bytes + start + 28, 2));
            if (start > zip->size || size > zip->size - start)
                fail("%s: %s goes beyond its end", zip->path, name);
            return read_npy(zip->bytes + start, size, name);
        }
        at += 46 + length + (size_t)(read_bytes(entry + 30, 2) + read_bytes(entry + 32, 2));
    }
    fail("%s has no array %s", zip->path, key);
    return (Array){0, 0, {0, {0}}, NULL};
}

/* Returns an element as a number. */
static double read_number(const Array *array, size_t place)
{
    const unsigned char *bytes = array->bytes + place * (size_t)array->width;
    uint64_t bits = read_bytes(bytes, array->width);
    if (array->type == 'f' && array->width == 4) {
        uint32_t half = (uint32_t)bits;
        float value;
        memcpy(&value, &half, sizeof value);
        return value;
    }
    if (array->type == 'f' && array->width == 8) {
        double value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    if (array->type == 'i' && array->width <= 8) {
        double below = bits >> (8 * array->width - 1) ? ldexp(1.0, 8 * array->width) : 0.0;
        return (double)bits - below;
    }
    decline("an array of dtype %c%d", array->type, array->width);
    return 0.0;
}

/* Returns the integers of an int8 array. */
static int8_t *read_integers(const Array *array, const char *what)
{
    size_t place, count = count_elements(&array->shape);
    int8_t *integers = take(count, 1);
    if (array->type != 'i' || array->width != 1)
        decline("%s is of dtype %c%d; the machine has int8", what, array->type, array->width);
    for (place = 0; place < count; place++)
        integers[place] = to_int8(array->bytes[place]);
    return integers;
}

/* -- fixed-point arithmetic --------------------------------------------------------------------------------------- */

typedef struct {
    int8_t *data;
    Shape shape;
} Tensor;

/* real = (integer - zero_point) * scale, for integers from low to high */
typedef struct {
    double scale;
    int32_t zero_point, low, high;
} Grid;

/* multiplier * 2^-shift, the multiplier of 31 bits: at least 2^30, or 0 */
typedef struct {
    int32_t multiplier;
    int shift;
} Factor;

/* Returns the factor that is nearest to a real one, which is not negative. (When a model is loaded.) */
static Factor make_factor(double real)
{
    Factor factor = {0, 31};
    int exponent;
    double mantissa;
    if (!(real >= 0.0) || real > 1073741824.0)
        decline("a factor of %g cannot be held", real);
    mantissa = rint(frexp(real, &exponent) * 2147483648.0);
    if (mantissa == 2147483648.0) {
        mantissa /= 2;
        exponent++;
    }
    factor.multiplier = (int32_t)mantissa;
    factor.shift = 31 - exponent;
    return factor;
}

/* Returns sum * factor, rounded half up: floor(x + 1/2). The product is below 2^62, and so is its rounded quotient. */
static int32_t rescale(int32_t sum, Factor factor)
{
    int64_t product = (int64_t)sum * factor.multiplier;
    if (factor.shift > 62)
        return 0; /* less than 1/2 */
#if BUG != 1
    if (factor.shift > 0)
        product += (int64_t)1 << (factor.shift - 1);
#endif
    product = product < 0 ? ~(~product >> factor.shift) : product >> factor.shift; /* floor, also below zero */
    return product > 1 << 30 ? 1 << 30 : product < -(1 << 30) ? -(1 << 30) : (int32_t)product;
}

/* Returns a + b, or the end of int32 that it is beyond. */
static int32_t add_saturating(int32_t a, int32_t b)
{
    if (b > 0 && a > INT32_MAX - b)
        return INT32_MAX;
    return b < 0 && a < INT32_MIN - b ? INT32_MIN : a + b;
}

/* Returns a sum as the accumulator holds it. */
static int32_t hold(int32_t sum)
{
#if BUG == 3
    int32_t low = (int32_t)((uint32_t)sum & 0xFFFF);
    return low < 32768 ? low : low - 65536;
#else
    return sum;
#endif
}

/* Returns an integer of a grid from a rescaled sum; a fused relu ends at the grid's zero. */
static int8_t to_grid(int32_t rescaled, const Grid *grid, bool has_relu)
{
    int32_t value = rescaled + grid->zero_point, low = grid->low;
#if BUG == 5
    int32_t zero = 0;
#else
    int32_t zero = grid->zero_point;
#endif
    if (has_relu && zero > low)
        low = zero;
    return (int8_t)(value < low ? low : value > grid->high ? grid->high : value);
}

/* -- kernels: an op of a model, loaded ---------------------------------------------------------------------------- */

typedef enum { CONV, LINEAR, ADD, MUL, RELU, MAX_POOL, AVERAGE, ADAPTIVE, TABLE, CAT, COPY, FLATTEN, SLICE, NORM } Op;

static const char *const NAMES[] = {"conv2d",   "linear",       "add",   "mul", "relu",    "max_pool2d",
                                    "avg_pool", "adaptive_avg", "table", "cat", "copy",    "flatten",
                                    "slice",    "batch_norm"};

typedef struct {
    Op op;
    const char *name;
    int inputs[MOST_INPUTS], count; /* numbers of nodes */
    Grid from[MOST_INPUTS], to;
    bool has_relu;
    Factor factors[MOST_INPUTS], factor; /* of each input, and of the result */
    int sign[MOST_INPUTS];
    int32_t constant; /* what add adds, in its steps */
    int8_t *weight;
    Shape weight_shape;
    int32_t *bias;                              /* of a norm in its steps, as the constant of add */
    Factor *per_channel, *of_input;             /* of the result; of a norm also of what it adds the bias to */
    int *signs;                                 /* of a norm's channels */
    int32_t kernel[2], stride[2], before[2], after[2], dilation[2], groups;
    bool rounds_up, counts_padding; /* of pools: ceil_mode, count_include_pad */
    int32_t divisor;                /* of an average, 0: the number of its elements */
    Factor *by_divisor;
    int32_t most_divisor;
    int32_t first_axis, last_axis; /* of cat, flatten and slice */
    const Json *parts;             /* of slice: the number of parts, or their sizes */
    bool has_sizes;
    int32_t part;
    bool keeps[2];                 /* of adaptive pools: the size of that axis stays */
    int8_t table[256];
} Step;

static Tensor make_tensor(Shape shape)
{
    Tensor tensor = {take(count_elements(&shape), 1), shape};
    return tensor;
}

/* Returns images and channels before the last two axes, as one number. */
static int32_t count_planes(const Shape *shape)
{
    Shape outer = *shape;
    outer.rank -= 2;
    return (int32_t)count_elements(&outer);
}

/* Sum of the products of one window, within the image; what is beyond it is zero, as the zero point stands for it. */
static int32_t sum_window(const Step *step, const int8_t *image, const int8_t *weight, const int32_t sizes[2],
                          int32_t channels, int32_t top, int32_t left)
{
    int32_t sum = 0, zero = step->from[0].zero_point, c, i, j;
    for (c = 0; c < channels; c++) {
        for (i = 0; i < step->kernel[0]; i++) {
            for (j = 0; j < step->kernel[1]; j++) {
                int32_t y = top + i * step->dilation[0], x = left + j * step->dilation[1];
                int32_t w = weight[(c * step->kernel[0] + i) * step->kernel[1] + j];
                bool is_inside = y >= 0 && y < sizes[0] && x >= 0 && x < sizes[1];
#if BUG == 2
                int32_t padded = 0;
#else
                int32_t padded = zero;
#endif
                sum = hold(sum + ((is_inside ? image[(c * sizes[0] + y) * sizes[1] + x] : padded) - zero) * w);
            }
        }
    }
    return sum;
}

static int8_t finish_sum(const Step *step, int32_t sum, int32_t channel)
{
    int32_t with_bias = hold(add_saturating(sum, step->bias[channel]));
#if BUG == 4
    channel = 0;
#endif
    return to_grid(rescale(with_bias, step->per_channel[channel]), &step->to, step->has_relu);
}

static Tensor run_conv(const Step *step, const Tensor *x)
{
    int32_t channels = step->weight_shape.sizes[0], per_group = step->weight_shape.sizes[1], planes, n, c, i, j;
    int rank = x->shape.rank, axis;
    int32_t filter = per_group * step->kernel[0] * step->kernel[1], out[2];
    const int32_t *sizes;
    Shape shape = x->shape;
    Tensor y;
    if (rank < 3 || x->shape.sizes[rank - 3] != per_group * step->groups)
        fail("%s: an input of %d axes, or of other channels", step->name, rank);
    sizes = x->shape.sizes + rank - 2;
    for (axis = 0; axis < 2; axis++) {
        int32_t span = sizes[axis] + step->before[axis] + step->after[axis];
        int32_t rest = span - step->dilation[axis] * (step->kernel[axis] - 1) - 1;
        if (rest < 0)
            fail("%s: an image smaller than the kernel", step->name);
        out[axis] = shape.sizes[rank - 2 + axis] = rest / step->stride[axis] + 1;
    }
    shape.sizes[rank - 3] = channels;
    y = make_tensor(shape);
    planes = count_planes(&shape);
    for (n = 0; n < planes; n++) {
        int32_t batch = n / channels, group;
        const int8_t *image;
        c = n % channels;
        group = c / (channels / step->groups);
        image = x->data + (batch * step->groups + group) * per_group * sizes[0] * sizes[1];
        for (i = 0; i < out[0]; i++) {
            for (j = 0; j < out[1]; j++) {
                int32_t top = i * step->stride[0] - step->before[0], left = j * step->stride[1] - step->before[1];
                int32_t sum = sum_window(step, image, step->weight + c * filter, sizes, per_group, top, left);
                y.data[(n * out[0] + i) * out[1] + j] = finish_sum(step, sum, c);
            }
        }
    }
    return y;
}

static Tensor run_linear(const Step *step, const Tensor *x)
{
    int32_t out = step->weight_shape.sizes[0], in = step->weight_shape.sizes[1], zero = step->from[0].zero_point;
    Shape shape = x->shape;
    size_t row, rows, c;
    Tensor y;
    if (shape.rank < 1 || shape.sizes[shape.rank - 1] != in)
        fail("%s: an input of other features", step->name);
    shape.sizes[shape.rank - 1] = 1;
    rows = count_elements(&shape);
    shape.sizes[shape.rank - 1] = out;
    y = make_tensor(shape);
    for (row = 0; row < rows; row++) {
        for (c = 0; c < (size_t)out; c++) {
            int32_t sum = 0, k;
            const int8_t *values = x->data + row * (size_t)in, *weights = step->weight + c * (size_t)in;
            for (k = 0; k < in; k++)
                sum = hold(sum + (values[k] - zero) * weights[k]);
            y.data[row * (size_t)out + c] = finish_sum(step, sum, (int32_t)c);
        }
    }
    return y;
}

/* Returns the shape to which shapes are broadcast. */
static Shape broadcast(const Step *step, const Tensor *const *x)
{
    Shape shape = x[0]->shape;
    int k, axis;
    for (k = 1; k < step->count; k++) {
        const Shape *other = &x[k]->shape;
        while (shape.rank < other->rank) {
            memmove(shape.sizes + 1, shape.sizes, (size_t)shape.rank * sizeof shape.sizes[0]);
            shape.sizes[0] = 1;
            shape.rank++;
        }
        for (axis = 1; axis <= other->rank; axis++)
            if (shape.sizes[shape.rank - axis] == 1)
                shape.sizes[shape.rank - axis] = other->sizes[other->rank - axis];
    }
    return shape;
}

/* Returns the integer less its zero point that a broadcast tensor has at a place of the result. */
static int32_t read_broadcast(const Tensor *tensor, const Grid *grid, const Shape *shape, size_t at)
{
    size_t from = 0, stride = 1;
    int axis;
    for (axis = 1; axis <= shape->rank; axis++) {
        size_t extent = (size_t)shape->sizes[shape->rank - axis], index = at % extent;
        at /= extent;
        if (axis <= tensor->shape.rank) {
            size_t own = (size_t)tensor->shape.sizes[tensor->shape.rank - axis];
            from += (own == 1 ? 0 : index) * stride;
            stride *= own;
        }
    }
    return tensor->data[from] - grid->zero_point;
}

static Tensor run_binary(const Step *step, const Tensor *const *x)
{
    Shape shape = broadcast(step, x);
    Tensor y = make_tensor(shape);
    size_t at, count = count_elements(&shape);
    for (at = 0; at < count; at++) {
        int32_t sum = step->op == ADD ? step->constant : 1;
        int k;
        for (k = 0; k < step->count; k++) {
            int32_t own = step->sign[k] * read_broadcast(x[k], &step->from[k], &shape, at);
            if (step->op == ADD)
                sum += rescale(own * (1 << FRACTION), step->factors[k]);
            else
                sum *= own;
        }
        y.data[at] = to_grid(rescale(sum, step->factor), &step->to, step->has_relu);
    }
    return y;
}

static Tensor run_norm(const Step *step, const Tensor *x)
{
    Tensor y = make_tensor(x->shape);
    size_t at, count = count_elements(&x->shape), channels = (size_t)step->weight_shape.sizes[0], inner = 1;
    int axis;
    if (x->shape.rank < 2 || (size_t)x->shape.sizes[1] != channels)
        fail("%s: an input of other channels", step->name);
    for (axis = 2; axis < x->shape.rank; axis++)
        inner *= (size_t)x->shape.sizes[axis];
    for (at = 0; at < count; at++) {
        size_t c = at / inner % channels;
        int32_t own = step->signs[c] * (x->data[at] - step->from[0].zero_point) * (1 << FRACTION);
        int32_t sum = rescale(own, step->of_input[c]) + step->bias[c];
        y.data[at] = to_grid(rescale(sum, step->per_channel[c]), &step->to, step->has_relu);
    }
    return y;
}

/* Moves elements to the grid of the result. */
static void move(const Step *step, int input, const int8_t *from, int8_t *to, size_t count)
{
    size_t at;
    for (at = 0; at < count; at++) {
#if BUG == 7
        if (step->op == CAT && input == 1) {
            to[at] = from[at];
            continue;
        }
#endif
        int32_t own = rescale(from[at] - step->from[input].zero_point, step->factors[input]);
        to[at] = to_grid(own, &step->to, step->has_relu);
    }
}

static int32_t wrap_axis(int32_t axis, int rank, const char *name)
{
    int32_t most = rank > 0 ? rank : 1;
    if (axis < -most || axis >= most)
        fail("%s: axis %d of %d", name, (int)axis, rank);
    return axis < 0 ? axis + most : axis;
}

static Tensor run_cat(const Step *step, const Tensor *const *x)
{
    int32_t axis = wrap_axis(step->first_axis, x[0]->shape.rank, step->name);
    Shape shape = x[0]->shape, outer = x[0]->shape;
    size_t inner = 1, row, rows, start = 0, length;
    Tensor y;
    int k;
    for (k = axis + 1; k < shape.rank; k++)
        inner *= (size_t)shape.sizes[k];
    outer.rank = axis;
    rows = count_elements(&outer);
    shape.sizes[axis] = 0;
    for (k = 0; k < step->count; k++)
        shape.sizes[axis] += x[k]->shape.sizes[axis];
    y = make_tensor(shape);
    length = (size_t)shape.sizes[axis] * inner;
    for (k = 0; k < step->count; k++) {
        size_t own = (size_t)x[k]->shape.sizes[axis] * inner;
        for (row = 0; row < rows; row++)
            move(step, k, x[k]->data + row * own, y.data + row * length + start, own);
        start += own;
    }
    return y;
}

static Tensor run_move(const Step *step, const Tensor *x)
{
    Shape shape = x->shape;
    Tensor y;
    if (step->op == FLATTEN) {
        int32_t first = wrap_axis(step->first_axis, shape.rank, step->name), axis;
        int32_t last = wrap_axis(step->last_axis, shape.rank, step->name);
        if (shape.rank == 0)
            shape.sizes[shape.rank++] = 1;
        for (axis = first + 1; axis <= last; axis++)
            shape.sizes[first] *= shape.sizes[axis];
        for (axis = last + 1; axis < shape.rank; axis++)
            shape.sizes[axis - (last - first)] = shape.sizes[axis];
        shape.rank -= last - first;
    }
    y = make_tensor(shape);
    move(step, 0, x->data, y.data, count_elements(&shape));
    return y;
}

/* Takes one of the parts into which torch.chunk or torch.split cuts an axis. */
static Tensor run_slice(const Step *step, const Tensor *x)
{
    int32_t axis = wrap_axis(step->first_axis, x->shape.rank, step->name), extent = x->shape.sizes[axis];
    int32_t start = 0, length = extent, part = step->part;
    size_t inner = 1, row, rows;
    Shape shape = x->shape, outer = x->shape;
    Tensor y;
    int k;
    if (step->parts->kind == LIST) {
        const Json *each = step->parts->first;
        for (; part > 0 && each != NULL; part--, each = each->next)
            start += as_int(each, "a size");
        length = each == NULL ? -1 : as_int(each, "a size");
    } else {
        int32_t number = as_int(step->parts, "the number of parts");
        if (number < 1)
            fail("%s: %d parts", step->name, (int)number);
        length = step->has_sizes ? number : (extent + number - 1) / number;
        start = part * length;
        length = start + length > extent ? extent - start : length;
    }
    if (part < 0 || length < 0 || start + length > extent)
        fail("%s: part %d is beyond the axis", step->name, (int)step->part);
    for (k = axis + 1; k < shape.rank; k++)
        inner *= (size_t)shape.sizes[k];
    outer.rank = axis;
    rows = count_elements(&outer);
    shape.sizes[axis] = length;
    y = make_tensor(shape);
    for (row = 0; row < rows; row++)
        move(step, 0, x->data + (row * (size_t)extent + (size_t)start) * inner, y.data + row * (size_t)length * inner,
             (size_t)length * inner);
    return y;
}

static Tensor run_table(const Step *step, const Tensor *x)
{
    Tensor y = make_tensor(x->shape);
    size_t at, count = count_elements(&x->shape);
    for (at = 0; at < count; at++) {
#if BUG == 8
        y.data[at] = step->table[(x->data[at] - LOWEST + 1) % 256];
#else
        y.data[at] = step->table[x->data[at] - LOWEST];
#endif
    }
    return y;
}

/* -- pools -------------------------------------------------------------------------------------------------------- */

/* The part of an axis that a window covers. `span`: its length within the padded image. */
typedef struct {
    int32_t start, end, span;
} Window;

static Window find_window(const Step *step, int axis, int32_t size, int32_t out, int32_t at)
{
    Window window;
    if (step->op == ADAPTIVE) { /* from floor(at * size / out) to ceil((at + 1) * size / out) */
        window.start = at * size / out;
        window.end = ((at + 1) * size + out - 1) / out;
        window.span = window.end - window.start;
        return window;
    }
    window.start = at * step->stride[axis] - step->before[axis];
    window.end = window.start + step->dilation[axis] * (step->kernel[axis] - 1) + 1;
    if (window.end > size + step->before[axis])
        window.end = size + step->before[axis];
    window.span = window.end - window.start;
    while (window.start < 0)
        window.start += step->dilation[axis];
    if (window.end > size)
        window.end = size;
    return window;
}

static int32_t find_pooled_size(const Step *step, int axis, int32_t size)
{
    int32_t stride = step->stride[axis], before = step->before[axis], rest, out;
    if (step->op == ADAPTIVE)
        return step->keeps[axis] ? size : step->kernel[axis];
    rest = size + 2 * before - step->dilation[axis] * (step->kernel[axis] - 1) - 1;
    if (rest < 0 && !(step->rounds_up && rest > -stride))
        fail("%s: an image smaller than the window", step->name);
    out = (rest + (step->rounds_up ? stride - 1 : 0)) / stride + 1;
    return step->rounds_up && (out - 1) * stride >= size + before ? out - 1 : out; /* no window beyond the image */
}

static Factor average_factor(const Step *step, int32_t divisor)
{
    return make_factor(step->from[0].scale / (step->to.scale * divisor));
}

/* Makes the factors of all divisors that an image of this size may need. (When a model is loaded for it.) */
static void make_divisors(Step *step, const int32_t sizes[2])
{
    int32_t most = step->kernel[0] * step->kernel[1], divisor;
    if (step->op == ADAPTIVE)
        most = sizes[0] * sizes[1];
    if (step->divisor > 0 && step->divisor > most)
        most = step->divisor;
    if (most <= step->most_divisor)
        return;
    if (most > MOST_PRODUCTS)
        decline("an average of %d elements", (int)most);
    step->by_divisor = take((size_t)most + 1, sizeof(Factor));
    step->most_divisor = most;
    for (divisor = 1; divisor <= most; divisor++)
        step->by_divisor[divisor] = average_factor(step, divisor);
}

static int8_t pool_window(const Step *step, const int8_t *image, int32_t width, Window rows, Window columns)
{
    int32_t sum = 0, largest = LOWEST, zero = step->from[0].zero_point, y, x, divisor;
    for (y = rows.start; y < rows.end; y += step->dilation[0]) {
        for (x = columns.start; x < columns.end; x += step->dilation[1]) {
            int32_t own = image[y * width + x];
            sum = hold(sum + own - zero);
            largest = own > largest ? own : largest;
        }
    }
    if (step->op == MAX_POOL)
        return to_grid(rescale(largest - zero, step->factors[0]), &step->to, step->has_relu);
    divisor = (rows.end - rows.start) * (columns.end - columns.start);
    if (step->op == AVERAGE) {
#if BUG == 6
        divisor = step->kernel[0] * step->kernel[1];
#else
        divisor = step->divisor > 0 ? step->divisor : step->counts_padding ? rows.span * columns.span : divisor;
#endif
    }
    return to_grid(divisor > 0 ? rescale(sum, step->by_divisor[divisor]) : 0, &step->to, step->has_relu);
}

static Tensor run_pool(const Step *step, const Tensor *x)
{
    int rank = x->shape.rank;
    const int32_t *sizes = x->shape.sizes + rank - 2;
    Shape shape = x->shape;
    int32_t out[2], planes = count_planes(&shape), n, i, j;
    Tensor y;
    for (i = 0; i < 2; i++)
        out[i] = shape.sizes[rank - 2 + i] = find_pooled_size(step, i, sizes[i]);
    y = make_tensor(shape);
    for (n = 0; n < planes; n++) {
        for (i = 0; i < out[0]; i++) {
            Window rows = find_window(step, 0, sizes[0], out[0], i);
            for (j = 0; j < out[1]; j++) {
                Window columns = find_window(step, 1, sizes[1], out[1], j);
                const int8_t *image = x->data + n * sizes[0] * sizes[1];
                y.data[(n * out[0] + i) * out[1] + j] = pool_window(step, image, sizes[1], rows, columns);
            }
        }
    }
    return y;
}

static Tensor run_step(Step *step, const Tensor *const *x)
{
    switch (step->op) {
    case CONV:
        return run_conv(step, x[0]);
    case LINEAR:
        return run_linear(step, x[0]);
    case ADD:
    case MUL:
        return run_binary(step, x);
    case MAX_POOL:
    case AVERAGE:
    case ADAPTIVE:
        if (x[0]->shape.rank < 3)
            fail("%s: an input of %d axes", step->name, x[0]->shape.rank);
        if (step->op != MAX_POOL)
            make_divisors(step, x[0]->shape.sizes + x[0]->shape.rank - 2);
        return run_pool(step, x[0]);
    case TABLE:
        return run_table(step, x[0]);
    case SLICE:
        return run_slice(step, x[0]);
    case NORM:
        return run_norm(step, x[0]);
    case CAT:
        return run_cat(step, x);
    default:
        return run_move(step, x[0]);
    }
}

/* -- loading a model ---------------------------------------------------------------------------------------------- */

typedef struct {
    const Json *node;
    const char *name, *op;
    int source; /* the number of the node that it takes first; -1: an input, or a constant */
    int input;  /* of quantize: the number of the input that it takes, or -1 */
    Step *step; /* of quantize: what makes its integers, or NULL */
} Node;

typedef struct {
    Node *nodes;
    int count;
    const Json *graph, *operands;
    File weights;
} Model;

static int find_node(const Model *model, const Json *value)
{
    const Json *name = find(value, "node");
    int number = name == NULL ? -1 : model->count - 1;
    while (number >= 0 && strcmp(model->nodes[number].name, name->text) != 0)
        number--;
    return number;
}

/* Returns an argument of an op: by name, by its place, or of a module what it was made with. NULL: none, or None. */
static const Json *find_argument(const Json *node, const char *name, int number)
{
    const Json *found = find(find(node, "kwargs"), name);
    if (found == NULL && number >= 0 && find(node, "args") != NULL) {
        for (found = find(node, "args")->first; found != NULL && number > 0; number--)
            found = found->next;
    }
    if (found == NULL)
        found = find(find(node, "arguments"), name);
    return found == NULL || found->kind == NOTHING ? NULL : found;
}

static double read_argument(const Json *node, const char *name, int number, double otherwise)
{
    const Json *found = find_argument(node, name, number);
    if (found != NULL && found->kind != NUMBER && found->kind != TRUTH)
        decline("%s of %s is no number", name, need_text(node, "op"));
    return found == NULL ? otherwise : found->number;
}

static int32_t read_whole(const Json *node, const char *name, int number, int32_t otherwise)
{
    const Json *found = find_argument(node, name, number);
    return found == NULL ? otherwise : as_int(found, name);
}

/* Reads one whole number for both axes, or two. */
static void read_pair(const Json *node, const char *name, int number, int32_t otherwise, int32_t pair[2])
{
    const Json *found = find_argument(node, name, number);
    pair[0] = pair[1] = otherwise;
    if (found != NULL && found->kind == LIST) {
        if (found->count != 1 && found->count != 2)
            decline("%s has %d items", name, found->count);
        pair[0] = as_int(found->first, name);
        pair[1] = found->count == 2 ? as_int(found->first->next, name) : pair[0];
    } else if (found != NULL) {
        pair[0] = pair[1] = as_int(found, name);
    }
}

static Grid read_grid(const Json *data)
{
    Grid grid;
    const Json *scale = find(data, "scale");
    if (scale == NULL || scale->kind != NUMBER || strcmp(need_text(data, "dtype"), "int8") != 0)
        decline("a tensor of %s: the machine has int8, with one scale", need_text(data, "dtype"));
    grid.scale = scale->number;
    grid.zero_point = as_int(need(data, "zero_point", NUMBER), "zero_point");
    grid.low = as_int(need(data, "low", NUMBER), "low");
    grid.high = as_int(need(data, "high", NUMBER), "high");
    if (!(grid.scale > 0.0) || grid.low < LOWEST || grid.high > HIGHEST || grid.low > grid.high
        || grid.zero_point < LOWEST || grid.zero_point > HIGHEST)
        decline("a grid of scale %g from %d to %d", grid.scale, (int)grid.low, (int)grid.high);
    return grid;
}

/* Adds an operand, which is a dequantize of integers. */
static void add_input(const Model *model, Step *step, const Json *value)
{
    int number = find_node(model, value);
    while (number >= 0 && strcmp(model->nodes[number].op, "nn.Identity") == 0)
        number = model->nodes[number].source;
    if (number < 0 || strcmp(model->nodes[number].op, "dequantize") != 0 || model->nodes[number].source < 0)
        decline("%s takes a value that is no dequantized tensor of int8", step->name);
    if (step->count == MOST_INPUTS)
        decline("%s takes more than %d tensors", step->name, MOST_INPUTS);
    step->from[step->count] = read_grid(model->nodes[number].node);
    step->sign[step->count] = 1;
    step->inputs[step->count++] = model->nodes[number].source;
}

/* -- weights */

/* Returns one of the scales of a weight, and sees that its zero points are 0. */
static double read_weight_scale(const Model *model, const Json *weight, int32_t channel)
{
    const Json *scale = find(weight, "scale"), *zero = find(weight, "zero_point"), *axis = find(weight, "axis");
    if (scale == NULL || zero == NULL)
        fail("a weight without qparams");
    if (scale->kind == NUMBER) {
        if (zero->number != 0)
            decline("a weight whose zero point is not 0");
        return scale->number;
    } else {
        Array scales = find_array(&model->weights, need_text(scale, "tensor"));
        Array zeros = find_array(&model->weights, need_text(zero, "tensor"));
        size_t count = count_elements(&scales.shape), at = count == 1 ? 0 : (size_t)channel;
        if (at >= count || count_elements(&zeros.shape) != count || (axis != NULL && axis->number != 0 && count > 1))
            decline("a weight whose scales are not those of its output channels");
        if (read_number(&zeros, at) != 0)
            decline("a weight whose zero point is not 0");
        return read_number(&scales, at);
    }
}

/* Loads weight and bias of a layer: a module's own, or those that a function is given. */
static void load_weight(const Model *model, Step *step, const Json *node)
{
    const Json *tensors = find(node, "tensors"), *weight = find(tensors, "weight"), *bias = find(tensors, "bias");
    Array held, added = {0, 0, {0, {0}}, NULL};
    int32_t channel;
    if (find(node, "arguments") == NULL) {
        int number = find_node(model, find_argument(node, "weight", 1));
        if (number < 0 || strcmp(model->nodes[number].op, "dequantize") != 0)
            decline("%s: a weight that is not constant", step->name);
        weight = model->nodes[number].node;
        bias = find_argument(node, "bias", 2);
        held = find_array(&model->weights, need_text(need(weight, "args", LIST)->first, "tensor"));
    } else {
        if (weight == NULL || find(weight, "scale") == NULL)
            decline("%s: a weight that is not quantized", step->name);
        held = find_array(&model->weights, need_text(weight, "tensor"));
    }
    if (bias != NULL && find(bias, "tensor") == NULL)
        decline("%s: a bias that is not constant", step->name);
    if (bias != NULL)
        added = find_array(&model->weights, need_text(bias, "tensor"));
    step->weight = read_integers(&held, "the weight");
    step->weight_shape = held.shape;
    if (held.shape.rank != (step->op == CONV ? 4 : 2) || held.shape.sizes[0] < 1)
        decline("%s: a weight of %d axes", step->name, held.shape.rank);
    if (count_elements(&held.shape) / (size_t)held.shape.sizes[0] > MOST_PRODUCTS)
        decline("%s: a sum of more than %d products may not fit int32", step->name, MOST_PRODUCTS);
    if (bias != NULL && count_elements(&added.shape) != (size_t)held.shape.sizes[0])
        decline("%s: a bias of other channels", step->name);
    step->per_channel = take((size_t)held.shape.sizes[0], sizeof(Factor));
    step->bias = take((size_t)held.shape.sizes[0], sizeof(int32_t));
    for (channel = 0; channel < held.shape.sizes[0]; channel++) {
        double unit = step->from[0].scale * read_weight_scale(model, weight, channel);
        if (!(unit > 0.0))
            decline("%s: a weight of scale %g", step->name, unit);
        step->per_channel[channel] = make_factor(unit / step->to.scale);
        if (bias != NULL) {
            double steps = rint(read_number(&added, (size_t)channel) / unit);
            step->bias[channel] = steps >= INT32_MAX   ? INT32_MAX
                                  : steps <= INT32_MIN ? INT32_MIN
                                                       : (int32_t)steps;
        }
    }
}

static void load_conv(const Model *model, Step *step, const Json *node)
{
    const Json *padding = find_argument(node, "padding", 4), *mode = find(find(node, "arguments"), "padding_mode");
    int axis;
    if (mode != NULL && strcmp(mode->text, "zeros") != 0)
        decline("%s: padding_mode %s", step->name, mode->text);
    load_weight(model, step, node);
    read_pair(node, "stride", 3, 1, step->stride);
    read_pair(node, "dilation", 5, 1, step->dilation);
    step->groups = read_whole(node, "groups", 6, 1);
    if (step->groups < 1 || step->weight_shape.sizes[0] % step->groups != 0)
        decline("%s: %d groups", step->name, (int)step->groups);
    if (step->stride[0] < 1 || step->stride[1] < 1 || step->dilation[0] < 1 || step->dilation[1] < 1)
        decline("%s: a stride or dilation below 1", step->name);
    if (padding == NULL || padding->kind != TEXT)
        read_pair(node, "padding", 4, 0, step->before);
    for (axis = 0; axis < 2; axis++) {
        step->kernel[axis] = step->weight_shape.sizes[2 + axis];
        step->after[axis] = step->before[axis];
        if (padding != NULL && padding->kind == TEXT && strcmp(padding->text, "same") == 0) {
            int32_t total = step->dilation[axis] * (step->kernel[axis] - 1);
            step->before[axis] = total / 2;
            step->after[axis] = total - total / 2;
        }
    }
}

/* -- other ops */

/* Loads a sum, a difference (`sign` is -1) or a product of two operands, of which one may be a number.
 *
 * A sum brings both to steps of 2^-20 of twice the coarser scale: 255 of those, doubled, are less than 2^28. */
static void load_binary(const Model *model, Step *step, const Json *node, double sign)
{
    double alpha = step->op == ADD ? sign * read_argument(node, "alpha", -1, 1.0) : 1.0;
    double number = 0.0, coarsest = 1e-30, factor = 1.0;
    bool has_number = false;
    double weights[2] = {0.0, 0.0};
    int operand_at, k;
    for (operand_at = 0; operand_at < 2; operand_at++) {
        const Json *operand = find_argument(node, operand_at == 0 ? "input" : "other", operand_at);
        double weight = operand_at == 1 ? alpha : 1.0;
        if (operand != NULL && operand->kind == NUMBER) {
            number = operand->number * weight;
            has_number = true;
        } else {
            add_input(model, step, operand);
            weights[step->count - 1] = weight;
        }
    }
    if (step->count == 0)
        decline("%s of numbers", step->name);
    coarsest = fmax(coarsest, fabs(number) / 255);
    for (k = 0; k < step->count; k++) {
        coarsest = fmax(coarsest, fabs(weights[k]) * step->from[k].scale);
        factor *= step->from[k].scale;
    }
    if (step->op == MUL) {
        step->sign[0] = has_number && number < 0 ? -1 : 1;
        step->factor = make_factor(factor * (has_number ? fabs(number) : 1.0) / step->to.scale);
        return;
    }
    for (k = 0; k < step->count; k++) {
        step->sign[k] = weights[k] < 0 ? -1 : 1;
        step->factors[k] = make_factor(fabs(weights[k]) * step->from[k].scale / (2 * coarsest));
    }
    step->constant = (int32_t)rint(ldexp(number / (2 * coarsest), FRACTION));
    step->factor = make_factor(ldexp(2 * coarsest / step->to.scale, -FRACTION));
}

/* Reads one of the tensors of a batch norm. */
static double read_of_norm(const Model *model, const Json *node, const char *name, int32_t channel, double otherwise)
{
    const Json *held = find(find(node, "tensors"), name);
    Array array;
    if (held == NULL)
        return otherwise;
    array = find_array(&model->weights, need_text(held, "tensor"));
    if ((size_t)channel >= count_elements(&array.shape))
        fail("%s: of other channels", name);
    return read_number(&array, (size_t)channel);
}

/* Loads a batch norm: in each channel x times a number, plus a number. It adds them as a sum does. */
static void load_norm(const Model *model, Step *step, const Json *node)
{
    const Json *statistics = find(find(node, "tensors"), "running_mean");
    int32_t channel, channels = read_whole(node, "num_features", -1, 0);
    if (statistics == NULL || channels < 1)
        decline("%s: without statistics of its own", step->name);
    step->weight_shape.sizes[0] = channels;
    step->bias = take((size_t)channels, sizeof(int32_t));
    step->per_channel = take((size_t)channels, sizeof(Factor));
    step->of_input = take((size_t)channels, sizeof(Factor));
    step->signs = take((size_t)channels, sizeof(int));
    for (channel = 0; channel < channels; channel++) {
        double variance = read_of_norm(model, node, "running_var", channel, 1.0);
        double deviation = sqrt(variance + read_argument(node, "eps", -1, 0.0));
        double slope = read_of_norm(model, node, "weight", channel, 1.0) / deviation;
        double offset = read_of_norm(model, node, "bias", channel, 0.0)
                        - read_of_norm(model, node, "running_mean", channel, 0.0) * slope;
        double coarsest = fmax(fmax(fabs(slope) * step->from[0].scale, fabs(offset) / 255), 1e-30);
        if (!isfinite(slope) || !isfinite(offset))
            decline("%s: a slope of %g", step->name, slope);
        step->signs[channel] = slope < 0 ? -1 : 1;
        step->of_input[channel] = make_factor(fabs(slope) * step->from[0].scale / (2 * coarsest));
        step->bias[channel] = (int32_t)rint(ldexp(offset / (2 * coarsest), FRACTION));
        step->per_channel[channel] = make_factor(ldexp(2 * coarsest / step->to.scale, -FRACTION));
    }
}

static void load_pool(Step *step, const Json *node)
{
    /* where the arguments of the functions stand: max_pool2d has a dilation, avg_pool2d has how it counts */
    bool is_max = step->op == MAX_POOL;
    int axis;
    read_pair(node, "kernel_size", 1, 1, step->kernel);
    read_pair(node, "stride", 2, 0, step->stride);
    read_pair(node, "padding", 3, 0, step->before);
    step->dilation[0] = step->dilation[1] = 1;
    if (is_max)
        read_pair(node, "dilation", 4, 1, step->dilation);
    step->rounds_up = read_argument(node, "ceil_mode", is_max ? 5 : 4, 0) != 0;
    if (read_argument(node, "return_indices", -1, 0) != 0)
        decline("%s with indices", step->name);
    step->counts_padding = is_max || read_argument(node, "count_include_pad", 5, 1) != 0;
    step->divisor = is_max ? 0 : read_whole(node, "divisor_override", 6, 0);
    if (step->divisor < 0)
        decline("%s: a divisor below 0", step->name);
    for (axis = 0; axis < 2; axis++)
        if (find_argument(node, "stride", 2) == NULL || step->stride[axis] == 0)
            step->stride[axis] = step->kernel[axis];
}

static void load_adaptive(Step *step, const Json *node)
{
    const Json *size = find_argument(node, "output_size", 1), *each;
    int axis;
    step->dilation[0] = step->dilation[1] = 1;
    for (axis = 0; axis < 2; axis++) {
        each = size;
        if (size != NULL && size->kind == LIST)
            each = axis == 0 || size->count == 1 ? size->first : size->first->next;
        step->keeps[axis] = each == NULL || each->kind == NOTHING;
        step->kernel[axis] = step->keeps[axis] ? 0 : as_int(each, "output_size");
    }
}

typedef double (*Function)(double);

static double sigmoid(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

static double hardsigmoid(double x)
{
    return fmin(fmax(x + 3.0, 0.0), 6.0) / 6.0;
}

static double hardswish(double x)
{
    return x * hardsigmoid(x);
}

static double gelu(double x)
{
    return 0.5 * x * (1.0 + erf(x * sqrt(0.5)));
}

static double gelu_by_tanh(double x)
{
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); /* sqrt(2 / pi) */
}

static const struct {
    const char *op;
    Function function;
} FUNCTIONS[] = {
    {"nn.Sigmoid", sigmoid},         {"torch.sigmoid", sigmoid},     {"nn.Hardsigmoid", hardsigmoid},
    {"F.hardsigmoid", hardsigmoid},  {"nn.Hardswish", hardswish},    {"F.hardswish", hardswish},
    {"nn.GELU", gelu},               {"F.gelu", gelu},
};

/* Makes the table of a function: its result for each of the 256 integers. */
static void load_table(Step *step, const Node *op)
{
    const Json *approximate = find_argument(op->node, "approximate", -1);
    Function function = NULL;
    size_t row;
    int32_t q;
    for (row = 0; row < sizeof FUNCTIONS / sizeof FUNCTIONS[0]; row++)
        if (strcmp(FUNCTIONS[row].op, op->op) == 0)
            function = FUNCTIONS[row].function;
    if (function == NULL)
        decline("%s: the machine has no table of %s", op->name, op->op);
    if (approximate != NULL && strcmp(approximate->text, "tanh") == 0)
        function = gelu_by_tanh;
    for (q = LOWEST; q <= HIGHEST; q++) {
        double steps = rint(function((q - step->from[0].zero_point) * step->from[0].scale) / step->to.scale);
        step->table[q - LOWEST] = to_grid((int32_t)fmin(fmax(steps, -512.0), 512.0), &step->to, step->has_relu);
    }
}

/* Loads operator.getitem of torch.chunk or torch.split; nothing else is indexed. */
static void load_slice(const Model *model, Step *step, const Json *node)
{
    int number = find_node(model, find_argument(node, "input", 0));
    const Node *cut = number < 0 ? NULL : &model->nodes[number];
    if (cut == NULL || (strcmp(cut->op, "torch.chunk") != 0 && strcmp(cut->op, "torch.split") != 0))
        decline("%s: the machine indexes nothing but the parts of chunk and split", step->name);
    add_input(model, step, find_argument(cut->node, "input", 0));
    step->has_sizes = strcmp(cut->op, "torch.split") == 0;
    step->parts = find_argument(cut->node, step->has_sizes ? "split_size_or_sections" : "chunks", 1);
    step->first_axis = read_whole(cut->node, "dim", 2, 0);
    step->part = read_whole(node, "index", 1, 0);
    if (step->parts == NULL || step->part < 0)
        decline("%s: a part from the end, or of nothing", step->name);
}

static void load_cat(const Model *model, Step *step, const Json *node)
{
    const Json *list = find_argument(node, "tensors", 0), *each;
    if (list == NULL || list->kind != LIST || list->count == 0)
        decline("%s without a list", step->name);
    for (each = list->first; each != NULL; each = each->next)
        add_input(model, step, each);
    step->first_axis = read_whole(node, "dim", 1, 0);
}

static const struct {
    const char *name;
    Op op;
} OPS[] = {
    {"nn.Conv2d", CONV},
    {"torch.conv2d", CONV},
    {"nn.Linear", LINEAR},
    {"F.linear", LINEAR},
    {"operator.add", ADD},
    {"torch.add", ADD},
    {"operator.sub", ADD},
    {"torch.sub", ADD},
    {"operator.mul", MUL},
    {"torch.mul", MUL},
    {"nn.ReLU", RELU},
    {"F.relu", RELU},
    {"nn.MaxPool2d", MAX_POOL},
    {"F.max_pool2d", MAX_POOL},
    {"nn.AvgPool2d", AVERAGE},
    {"F.avg_pool2d", AVERAGE},
    {"nn.AdaptiveAvgPool2d", ADAPTIVE},
    {"F.adaptive_avg_pool2d", ADAPTIVE},
    {"torch.cat", CAT},
    {"nn.Identity", COPY},
    {"torch.flatten", FLATTEN},
    {"operator.getitem", SLICE},
    {"nn.BatchNorm2d", NORM},
};

static Op find_op(const Node *node)
{
    size_t row;
    for (row = 0; row < sizeof OPS / sizeof OPS[0]; row++)
        if (strcmp(OPS[row].name, node->op) == 0)
            return OPS[row].op;
    for (row = 0; row < sizeof FUNCTIONS / sizeof FUNCTIONS[0]; row++)
        if (strcmp(FUNCTIONS[row].op, node->op) == 0)
            return TABLE;
    decline("%s: the machine has no %s", node->name, node->op);
    return RELU;
}

/* Loads what makes the integers of a quantize: an op, or an op and a relu. */
static Step *load_step(const Model *model, const Node *quantize)
{
    Step *step = take(1, sizeof(Step));
    const Node *op = &model->nodes[quantize->source];
    const Json *first;
    int before, k;
    step->to = read_grid(quantize->node);
    step->op = find_op(op);
    before = step->op == RELU ? find_node(model, find_argument(op->node, "input", 0)) : -1;
    if (before >= 0 && strcmp(model->nodes[before].op, "dequantize") != 0) {
        step->has_relu = true;
        op = &model->nodes[before];
        step->op = find_op(op);
    }
    step->has_relu = step->has_relu || step->op == RELU;
    step->name = op->name;
    first = find_argument(op->node, "input", 0);
    if (step->op != ADD && step->op != MUL && step->op != CAT && step->op != SLICE)
        add_input(model, step, first);
    if (step->op == CONV)
        load_conv(model, step, op->node);
    else if (step->op == LINEAR)
        load_weight(model, step, op->node);
    else if (step->op == ADD || step->op == MUL)
        load_binary(model, step, op->node, strstr(op->op, ".sub") != NULL ? -1.0 : 1.0);
    else if (step->op == MAX_POOL || step->op == AVERAGE)
        load_pool(step, op->node);
    else if (step->op == ADAPTIVE)
        load_adaptive(step, op->node);
    else if (step->op == TABLE)
        load_table(step, op);
    else if (step->op == NORM)
        load_norm(model, step, op->node);
    else if (step->op == SLICE)
        load_slice(model, step, op->node);
    else if (step->op == CAT)
        load_cat(model, step, op->node);
    else if (step->op == FLATTEN) {
        step->first_axis = read_whole(op->node, "start_dim", 1, 0);
        step->last_axis = read_whole(op->node, "end_dim", 2, -1);
    }
    if (step->op != ADD)
        for (k = 0; k < step->count; k++)
            step->factors[k] = make_factor(step->from[k].scale / step->to.scale);
    return step;
}

/* Returns the number of the graph's input that a value is, or -1. */
static int find_input(const Model *model, const Json *value)
{
    const Json *name = find(value, "node"), *each = need(model->graph, "inputs", LIST)->first;
    int number;
    for (number = 0; name != NULL && each != NULL; each = each->next, number++)
        if (strcmp(each->text, name->text) == 0)
            return number;
    return -1;
}

static Model load_model(const char *device, const Json *data)
{
    const Json *files = need(data, "model", OBJECT), *each;
    Model model = {NULL, 0, NULL, NULL, {NULL, NULL, 0}};
    model.graph = read_json(spell("%s/%s", device, need_text(files, "json")));
    if (strcmp(need_text(model.graph, "format"), "fx-quant-graph") != 0
        || need(model.graph, "version", NUMBER)->number != 1)
        fail("a model in another format, or of another version");
    model.operands = need(data, "operands", LIST);
    model.weights = read_file(spell("%s/%s", device, need_text(files, "weights")));
    model.nodes = take((size_t)need(model.graph, "nodes", LIST)->count, sizeof(Node));
    for (each = need(model.graph, "nodes", LIST)->first; each != NULL; each = each->next) {
        Node *node = &model.nodes[model.count];
        const Json *first = find_argument(each, "input", 0);
        node->node = each;
        node->name = need_text(each, "name");
        node->op = need_text(each, "op");
        node->source = find_node(&model, first);
        node->input = find_input(&model, first);
        model.count++;
        if (strcmp(node->op, "quantize") != 0)
            continue;
        if (node->source >= 0)
            node->step = load_step(&model, node);
        else if (node->input < 0)
            decline("%s quantizes a constant", node->name);
    }
    return model;
}

/* -- running a case ----------------------------------------------------------------------------------------------- */

static bool are_same(const Grid *a, const Grid *b)
{
    return a->scale == b->scale && a->zero_point == b->zero_point && a->low == b->low && a->high == b->high;
}

/* Quantizes an input that does not lie on its grid. (This is the host's part: there are no integers yet.) */
static Tensor quantize(const Array *array, const Grid *grid)
{
    Tensor tensor = make_tensor(array->shape);
    size_t at, count = count_elements(&array->shape);
    for (at = 0; at < count; at++) {
        double steps = rint(read_number(array, at) / grid->scale);
        tensor.data[at] = to_grid(isnan(steps) ? 0 : (int32_t)fmin(fmax(steps, -512.0), 512.0), grid, false);
    }
    return tensor;
}

static Tensor read_input(const Model *model, const Node *node, const Json *run, const File *inputs)
{
    const Json *operand = need(run, "inputs", LIST)->first, *own = model->operands->first;
    Grid asked = read_grid(node->node), given;
    int number;
    Array array;
    Tensor tensor;
    for (number = node->input; number > 0 && operand != NULL && own != NULL; number--) {
        operand = operand->next;
        own = own->next;
    }
    if (operand == NULL || own == NULL)
        fail("a run without input %d", node->input);
    array = find_array(inputs, need_text(operand, "array"));
    if (strcmp(need_text(operand, "holds"), "integers") != 0)
        return quantize(&array, &asked);
    given = read_grid(own);
    if (!are_same(&asked, &given))
        decline("an input that is quantized to two grids");
    tensor.shape = array.shape;
    tensor.data = read_integers(&array, "an input");
    return tensor;
}

/* Writes the output number `output` of a run, which a value of the graph stands for. */
static void write_output(const Model *model, const Json *value, const Tensor *tensors, const char *folder, int run,
                         int output)
{
    int number = find_node(model, value), source;
    if (number < 0 || strcmp(model->nodes[number].op, "dequantize") != 0 || model->nodes[number].source < 0)
        decline("an output that is no dequantized tensor of int8");
    source = model->nodes[number].source;
    write_file(spell("%s/r%d_o%d.int8", folder, run, output), tensors[source].data,
               count_elements(&tensors[source].shape));
}

static void run_model(const Model *model, const Json *run, const File *inputs, const char *folder, int number)
{
    const Json *outputs = find(model->graph, "outputs"), *each;
    Tensor *tensors = take((size_t)model->count, sizeof(Tensor));
    const Tensor *operands[MOST_INPUTS];
    int n, k;
    for (n = 0; n < model->count; n++) {
        const Node *node = &model->nodes[n];
        if (strcmp(node->op, "quantize") != 0)
            continue;
        if (node->step == NULL) {
            tensors[n] = read_input(model, node, run, inputs);
            continue;
        }
        for (k = 0; k < node->step->count; k++)
            operands[k] = &tensors[node->step->inputs[k]];
        tensors[n] = run_step(node->step, operands);
    }
    if (outputs == NULL)
        fail("a model without outputs");
    if (outputs->kind == LIST) {
        for (each = outputs->first, n = 0; each != NULL; each = each->next, n++)
            write_output(model, each, tensors, folder, number, n);
    } else {
        write_output(model, outputs, tensors, folder, number, 0);
    }
}

/* Writes which ops ran on integers: all that the machine runs. */
static void write_execution(const Model *model, const char *folder)
{
    const char *ops = "";
    int n;
    for (n = 0; n < model->count; n++) {
        const Step *step = model->nodes[n].step;
        if (step != NULL)
            ops = spell("%s%s\"%s (int8 %s%s)\"", ops, *ops ? "," : "", step->name, NAMES[step->op],
                        step->has_relu && step->op != RELU ? " with relu" : "");
    }
    ops = spell("{\"float_fallbacks\":[],\"kernels\":[],\"quantized_ops\":[%s]}", ops);
    write_file(spell("%s/execution.json", folder), ops, strlen(ops));
}

static void write_refusal(const char *folder)
{
    char *text, *at;
    for (at = reason; *at != '\0'; at++)
        if (*at == '"' || *at == '\\' || (unsigned char)*at < 0x20)
            *at = '\'';
    text = spell("{\"status\":\"refused\",\"reason\":\"%s\"}", reason);
    write_file(spell("%s/status.json", folder), text, strlen(text));
}

static void make_folder(const char *path)
{
    if (mkdir(path, 0777) != 0 && errno != EEXIST)
        fail("%s: %s", path, strerror(errno));
}

static void run_case(const char *device, const char *out, const char *file)
{
    const Json *data = read_json(spell("%s/%s", device, file)), *run;
    const char *folder = spell("%s/%s", out, need_text(data, "case"));
    File inputs = read_file(spell("%s/%s", device, need_text(data, "inputs")));
    Model model;
    int number = 0;
    make_folder(folder);
    remove(spell("%s/status.json", folder)); /* of an earlier run */
    if (setjmp(on_decline) != 0) {
        write_refusal(folder);
        return;
    }
    model = load_model(device, data);
    for (run = need(data, "runs", LIST)->first; run != NULL; run = run->next)
        run_model(&model, run, &inputs, folder, number++);
    write_execution(&model, folder);
}

int main(int argc, char **argv)
{
    const Json *manifest, *row;
    int named;
    if (argc < 3) {
        fputs("usage: machine DEVICE OUT [CASE...]\n", stderr);
        return 2;
    }
    manifest = read_json(spell("%s/manifest.json", argv[1]));
    if (need(manifest, "schema", NUMBER)->number != 2)
        fail("%s: a bundle of another schema", argv[1]);
    make_folder(argv[2]);
    for (row = need(manifest, "cases", LIST)->first; row != NULL; row = row->next) {
        Piece *mark = newest;
        for (named = 3; named < argc && strcmp(argv[named], need_text(row, "case")) != 0;)
            named++;
        if (argc > 3 && named == argc)
            continue;
        run_case(argv[1], argv[2], need_text(row, "file"));
        give_back(mark);
    }
    give_back(NULL);
    return 0;
}
