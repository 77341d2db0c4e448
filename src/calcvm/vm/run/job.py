"""The data layout that Python shares with the compiled loops: control blocks, jobs, tasks, feeds."""

from __future__ import annotations

LINE = 64  # bytes of a cache line: words that several workers write are on separate lines

# A team's control block, byte offsets.  SERVE: the address of the workers' code; HIRED: their number; PACES: measured sizes of
# teams (`calcvm.vm.run.pace`).
N_PACES, PACE_BYTES = 64, 2 * LINE
PACES = 64 * LINE
CONTROL_BYTES = PACES + N_PACES * PACE_BYTES
BUSY, ARRIVED, GENERATION, HIRED, FIT, BOXES = (k * LINE for k in (0, 1, 2, 3, 4, 8))
SERVE = HIRED + 8
# FIT: number of workers that had cores when a team last waited for some that had none; the owner of BUSY writes it.
# CROWDED: until when jobs have no more workers than that, in ns of the monotonic clock, and how long this limit lasts.
CROWDED = FIT + 8
MAX_WORKERS = (PACES - BOXES) // LINE  # worker w has the box at BOXES + w * LINE

# A worker's box, byte offsets: the address of its job (0: none), then the words that it sleeps by.
PARKED, NUMBER, THREAD, SEMAPHORE = 8, 16, 24, 32  # a sem_t has 32 bytes

# Words of a job.
CODE, TEAM, BARRIER, TABLE, HEAP = range(5)  # CODE: the address of run_rows or run_rounds
# DEADLINE: ns of the monotonic clock (0: none); UNTIL: the step or round before which a team ended (0: none); ROW_BYTES: stride.
DEADLINE, UNTIL, ROW_BYTES = range(5, 8)
# PACE: the key under which the best size of a team is remembered.  1: the key is the address of the first row; 0: nothing is
# remembered, and the team has the requested size.  UNITS: number of steps or rounds that the job has run.
PACE, UNITS = range(8, 10)
ROWS, START, STOP, STEPS = range(10, 14)
(
    ROWS_FULL, ROWS_SHORT, ROWS_LAST,  # rows patched for the technical batch, a learning batch's rest, the data's rest
    SPANS, N_SPANS, END_SPANS, N_END_SPANS,  # (start, stop) pairs: each round; after a learning batch
    FEEDS, N_FEEDS, DRAINS, N_DRAINS, RESULTS, N_RESULTS, SUMS,
    N_SAMPLES, BATCH, LEARNING, FIRST, COUNT, KEY, SHUFFLE, ITEMSIZE, SEED_OFF,
    INDEX,  # address of int64 indexes of the samples in their arrays, or 0: the arrays themselves are the data set
    PART, PARTS,  # for a long round: run only this part, 1 to PARTS (0: whole rounds); see `slices.cut`
    REACHED,  # finished rounds of the pass
    # ORDER: address of N_ORDER pairs, or 0.  Round k of the pass is that of pair k modulo N_ORDER: (address of a path's words, which
    # are laid out as a job's, round of that path's own pass).  COUNTED: the samples of each of RESULTS in the pass, float64.
    ORDER, N_ORDER, COUNTED,
) = range(10, 40)  # fmt: skip
JOB_WORDS = 40
BY_LEARNING = 1 << 60  # marks offsets at RESULTS: see `calcvm.vm.run.samples.deliver`

# Words of a task: a rounds job that runs in turns, through epochs.  CODE is the address of run_rounds.
(
    ROUNDS, MEANS,  # rounds per epoch; destination of the next epoch's means of the results (float64; advances by N_RESULTS)
    EPOCH, LIMIT, SEED,  # finished epochs; the total to run; seed of the sample order
    JUDGE,  # a job with ROUNDS and MEANS that runs after each epoch, or 0; PATIENCE watches its first mean
    PATIENCE, BEST, SINCE,  # epochs without a new best (-1: no limit); the best (bits of a float64); epochs since the best
    STATUS,
    TURN,  # upper limit of rounds per turn (0: none)
    STAGED,  # on a GPU, as feeds: a buffer for the samples of the next round (ADDRESS), and their placeholders; or 0
    # Number of results that are functions of totals over the samples, or 0.  For each: the number of totals, and their places among
    # the sums and in the heap; the number of rows that compute it, and these rows; its place among the means and in the heap.
    FUNCTIONS,
    KEEP, IMAGE, IMAGE_BYTES,  # destination of the heap's image after an epoch with a new best, or 0; the image's offset in the heap
) = range(40, 56)  # fmt: skip
# Number of workers that try to run the task: the one that raises it from 0 runs it.  CLAIM has a cache line to itself.
CLAIM = 56
TASK_WORDS = 64
READY, FINISHED, STOPPED, NOT_FINITE, TRAPPED = range(5)  # STATUS; a task that is not READY is skipped

# Words of a fleet's job.
TASKS, N_TASKS, SLICE, LAPS = range(10, 14)  # address of the tasks' addresses; rounds per turn; turns per task
NEXT = 16  # number of turns given out, on a separate cache line
FLEET_WORDS = 24

# Words of a feed (source array to placeholder) or drain (result to array).
ADDRESS, DTYPE, ELEMS, OFFSET = range(4)
FEED_WORDS = 4
FEED_DTYPES = {
    "float32": 0,
    "float64": 1,
    "uint8": 2,
    "int32": 3,
    "int64": 4,
}  # types of arrays that are converted to the heap's floats
FEED_CELLS = {
    1: 5,
    4: 6,
    8: 7,
}  # by element size, for data that are copied unchanged, to or from cells of the same type
SAMPLED = 8  # DTYPE of a drain of scores whose ADDRESS is that of a sampler

# Words of a sampler (`calcvm.vm.run.sampling`).
(
    DRAW, STEPPED,  # address of the code of `draw`; number of finished steps
    SAMPLES, VOCABULARY, SCORE_BYTES,
    TEXT, LENGTHS, SEEDS,  # addresses of int64: tokens (steps, SAMPLES); lengths of the prompts; (seed, sample) of random numbers, by samples
    TOKENS, END,  # most tokens that a sample needs; the token that ends a text (-1: none)
    TOP_K, REALS,  # most tokens to draw one of; address of two float64: the temperature, and the share of the best tokens (at least 1: all)
    SPACE,  # address of 3 * VOCABULARY words to work in
    OVER,  # 1: all texts are complete; STRANGE + i: the scores of sample i are not finite
) = range(14)  # fmt: skip
SAMPLER_WORDS, STRANGE = 14, 2

SPINS = 2000  # about 20 us, then the thread yields: machines are oversubscribed
LATE_NS = 500_000  # worker 0 then checks whether the awaited workers have cores; other processes keep a core for longer
# PENALTY times the lost time is the limit's duration, at most MOST_PENALTY ns; a loss within AGAIN times the last limit is "soon".
PENALTY, MOST_PENALTY, AGAIN = 16, 2_000_000_000, 4
PARK_AFTER = 20000  # polls of its box before an idle worker goes to sleep

FEW_BITS, FEW_ROUNDS, MANY_ROUNDS = 6, 6, 3  # for the permutation of samples: it has more rounds up to FEW_BITS bits

# Words of a model, shared by its compiled methods (`calcvm.vm.calls.methods`).
MOST_PLACEHOLDERS, MOST_ARGUMENTS, MOST_RESULTS, MOST_RANK, MOST_BEFORE, KEPT_ROWS = 16, 8, 4, 5, 4, 8
STEP, PREDICT, EVALUATE, RUN, N_METHODS = range(5)
STREAM = N_METHODS  # has no words in a sheet: each stream has its own
(
    ARMED,  # not 0 while the model is in its slot, and no thread is about to take that
    TURN_OWNER, TRAINING_OWNER,  # addresses of the thread ids that own the model's turn, and its training
    PIECE, SLOT_JOB, CONTROL, RUN_ROWS, WORKERS,  # the slot's address and job; the code and team that run it
    SHEET,  # address of the words of its program
    SEQ,  # number of calls; calls are numbered by it
    CHANGED_AT, FORGOT_AT,  # the last call that changed the model; the last that made it forget placeholders and results
    LOOKED_AT,  # the last call that Python knows of; Python may have changed placeholders since
    HOLDS,  # (batch, the call that set it) of each placeholder
) = range(14)  # fmt: skip
DONE = HOLDS + 2 * MOST_PLACEHOLDERS  # (batch, the last call) of each method, and of streams
CALL_WORDS = DONE + 2 * (N_METHODS + 1)

# Words of a program's sheet, which its models' compiled methods read.
(
    ITEM,  # bytes of an element
    ARRAY_TYPE, INT_TYPE, DICT_TYPE, TUPLE_TYPE, NONE, OUT_NAME, NEW_ARRAY,  # objects of Python and NumPy; PyArray_Empty
    NO_PLACES,  # always 0: the place of an array's only row
    N_PLACEHOLDERS,
    PLANNED,  # the largest batch
    DTYPES,  # NumPy's dtype objects for the types in FEED_DTYPES
) = range(12)  # fmt: skip
PLACEHOLDERS = DTYPES + len(FEED_DTYPES)
# Words of a placeholder.  DIMS: its sizes follow from DIMS + 1 on.  CLASSES: the number of classes of labels (-1: probabilities,
# 0: any numbers).  IGNORED: the ignored label (0: none, since 0 is a class).  For a placeholder that does not have the heap's
# float type, EXACT is its dtype object, and AS_IT_IS the DTYPE of its feeds (else 0).
NAME, RANK, PER_SAMPLE, PLACE, CLASSES, IGNORED, EXACT, AS_IT_IS, DIMS = range(9)
PLACEHOLDER_WORDS = DIMS + MOST_RANK
METHODS = PLACEHOLDERS + MOST_PLACEHOLDERS * PLACEHOLDER_WORDS
# Words of a method: whether it is set up, its effects, its placeholders and its results (NAMED: in a dict).  MOST_SAMPLES:
# the limit for a call, which may run several batches.  N_INPUTS: the arguments in the first of two groups (0: all are passed
# one by one).
SET, CHANGES, FORGETS, MOST_SAMPLES, NAMED, N_INPUTS, N_ARGUMENTS, N_ANSWERS, N_SPANS_OF, SPANS_OF = range(10)
ROWS_OF = SPANS_OF + 3 * (
    MOST_BEFORE + 1
)  # after (start, stop, brief batch: see `slices.brief_batch`) of the paths before it and of the method's path
# ROWS_OF: (batch, address of its rows, ns of a call) of some batches, the planned one last; then the placeholders' numbers.
ARGUMENTS = ROWS_OF + 3 * (KEPT_ROWS + 1)
RESULTS_OF = ARGUMENTS + MOST_ARGUMENTS
# Words of a result: its offset, elements per sample, rank, address of its sizes, name object.
SINGLE, MEAN, SUM = -1, -2, -3  # instead of a rank: a number; one whose whole-data-set value is a mean, or a sum
RESULT, LENGTH, RESULT_RANK, RESULT_DIMS, RESULT_NAME = range(5)
RESULT_WORDS = 5
METHOD_WORDS = RESULTS_OF + MOST_RESULTS * RESULT_WORDS
SHEET_WORDS = METHODS + N_METHODS * METHOD_WORDS
# Words of a stream: those of a method, whose first rows are the stream's, and the address of the words of its model.
MODEL_WORDS = METHOD_WORDS
STREAM_WORDS = MODEL_WORDS + 1
LONG_NS = 1_000_000  # longer calls run in Python, where other threads can run meanwhile
