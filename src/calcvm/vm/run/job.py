"""The layout of what Python and the compiled loops share: control blocks, jobs, tasks, feeds."""

from __future__ import annotations

LINE = 64  # bytes of a cache line: what several workers write lies on lines of its own

# A team's control block, byte offsets.  SERVE: the address of what workers run; HIRED: how many there are; PACES: what is known
# of jobs (`calcvm.vm.run.pace`).
N_PACES, PACE_BYTES = 64, 2 * LINE
PACES = 64 * LINE
CONTROL_BYTES = PACES + N_PACES * PACE_BYTES
BUSY, ARRIVED, GENERATION, HIRED, FIT, BOXES = (k * LINE for k in (0, 1, 2, 3, 4, 8))
SERVE = HIRED + 8
# FIT: how many workers had cores when a team last waited for some that had none; who holds BUSY writes it.  CROWDED: until when jobs
# have no more, in ns of the monotonic clock, and for how long that was.
CROWDED = FIT + 8
MAX_WORKERS = (PACES - BOXES) // LINE  # worker w has the box at BOXES + w * LINE

# A worker's box, byte offsets: the address of the job that it has (0: none), then what it sleeps by.
PARKED, NUMBER, THREAD, SEMAPHORE = 8, 16, 24, 32  # a sem_t has 32 bytes

# Words of a job.
CODE, TEAM, BARRIER, TABLE, HEAP = range(5)  # CODE: the address of what runs it, run_rows or run_rounds
# Of the monotonic clock, in ns (0: none); where a team then ended: before this step or round (0: it did not); from row to row.
DEADLINE, UNTIL, ROW_BYTES = range(5, 8)
# PACE: the key under which the best size of a team is remembered.  1: the address of the first row is the key; 0: nothing is
# remembered, and the team is as large as asked.  UNITS: how many steps or rounds the job has run.
PACE, UNITS = range(8, 10)
ROWS, START, STOP, STEPS = range(10, 14)
(
    ROWS_FULL, ROWS_SHORT, ROWS_LAST,  # rows patched for the technical batch, a learning batch's rest, the data's rest
    SPANS, N_SPANS, END_SPANS, N_END_SPANS,  # (start, stop) pairs: each round; after a learning batch
    FEEDS, N_FEEDS, DRAINS, N_DRAINS, RESULTS, N_RESULTS, SUMS,
    N_SAMPLES, BATCH, LEARNING, FIRST, COUNT, KEY, SHUFFLE, ITEMSIZE, SEED_OFF,
    INDEX,  # address of int64 numbers of the samples in their arrays, or 0: the arrays themselves are the data set
    PART, PARTS,  # of a round that is long by itself: run this part alone, 1 to PARTS (0: whole rounds); see `slices.cut`
    REACHED,  # rounds of the pass that are done
) = range(10, 37)  # fmt: skip
JOB_WORDS = 40
BY_LEARNING = 1 << 60  # of the offsets at RESULTS: see `calcvm.vm.run.samples.deliver`

# Words of a task: a rounds job that is run a turn at a time, through epochs.  CODE is the address of run_rounds.
(
    ROUNDS, MEANS,  # rounds of an epoch; where the next epoch's means of the results go (float64, moved on by N_RESULTS)
    EPOCH, LIMIT, SEED,  # epochs done; to be done in all; seed of the order of the samples
    JUDGE,  # a job with ROUNDS and MEANS, run whole after each epoch, or 0; its first mean is what PATIENCE watches
    PATIENCE, BEST, SINCE,  # epochs without a new best (-1: any number); the best (bits of a float64); epochs since
    STATUS,
    TURN,  # rounds of a turn, at most (0: any number)
    STAGED,  # on a GPU, as feeds: where the samples of the next round wait (ADDRESS), and their placeholders; or 0
    # How many results are functions of totals over the samples; of each how many totals it reads, their places among the sums and in
    # the heap, how many rows make it, these rows, and its own place among the means and in the heap; or 0.
    FUNCTIONS,
    KEEP, IMAGE, IMAGE_BYTES,  # where an image of the heap goes after an epoch with a new best, or 0; where in the heap it is
) = range(37, 53)  # fmt: skip
# How many workers want the task: the one that raises it from 0 runs it.  No other word of a fleet's table is on its cache line.
CLAIM = 56
TASK_WORDS = 64
READY, FINISHED, STOPPED, NOT_FINITE, TRAPPED = range(5)  # STATUS; a task that is not READY is passed over

# Words of a fleet's job.
TASKS, N_TASKS, SLICE, LAPS = range(10, 14)  # address of the tasks' addresses; rounds of a turn; turns of each task
NEXT = 16  # turns given out, on a cache line of its own
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
}  # of arrays that become the heap's floats
FEED_CELLS = {
    1: 5,
    4: 6,
    8: 7,
}  # by the bytes of an element, of what is copied as it is, to or from cells of its own type

SPINS = 2000  # about 20 us, then the processor is offered to others: machines are oversubscribed
LATE_NS = 500_000  # after so long worker 0 asks whether those that it waits for have cores; other processes keep one for longer
# Of the time that was lost then, at most so many ns; and what comes within so many times the last one comes soon after it.
PENALTY, MOST_PENALTY, AGAIN = 16, 2_000_000_000, 4
PARK_AFTER = 20000  # looks into its box before an idle worker goes to sleep

FEW_BITS, FEW_ROUNDS, MANY_ROUNDS = 6, 6, 3  # of the permutation of samples: up to so many bits it has more rounds

# Words of a model that its compiled methods share (`calcvm.vm.memory.methods`).
MOST_PLACEHOLDERS, MOST_ARGUMENTS, MOST_RESULTS, MOST_RANK, MOST_BEFORE, KEPT_ROWS = 16, 8, 4, 5, 4, 8
STEP, PREDICT, EVALUATE, RUN, N_METHODS = range(5)
(
    ARMED,  # not 0 while the model is in its slot, and nobody means to take that
    TURN_OWNER, TRAINING_OWNER,  # addresses of the threads that have the model's turn, and its training
    PIECE, SLOT_JOB, CONTROL, RUN_ROWS, WORKERS,  # of the slot: its address, its job; what runs that
    SHEET,  # address of the words of its program
    SEQ,  # calls made, by which they are numbered
    CHANGED_AT, FORGOT_AT,  # the last that changed the model, that forgot what placeholders and results held
    LOOKED_AT,  # the last that Python has taken note of; what placeholders hold since then it may have changed
    HOLDS,  # (batch, the call that placed it) of each placeholder
) = range(14)  # fmt: skip
DONE = HOLDS + 2 * MOST_PLACEHOLDERS  # (batch, the last call) of each method
CALL_WORDS = DONE + 2 * N_METHODS

# Words of a program's sheet, which its models' compiled methods read.
(
    ITEM,  # bytes of an element
    ARRAY_TYPE, INT_TYPE, DICT_TYPE, TUPLE_TYPE, NONE, OUT_NAME, NEW_ARRAY,  # Python's and NumPy's objects; PyArray_Empty
    NO_PLACES,  # always 0: where the only row of an array lies
    N_PLACEHOLDERS,
    PLANNED,  # the largest batch
    DTYPES,  # NumPy's objects for the types in FEED_DTYPES
) = range(12)  # fmt: skip
PLACEHOLDERS = DTYPES + len(FEED_DTYPES)
# Words of a placeholder: sizes that are wanted from DIMS + 1 on; CLASSES of labels (-1: probabilities, 0: any numbers), and
# the number that is IGNORED there (0: none, as that is a class); of one
# of a type of its own EXACT, NumPy's object for that, and AS_IT_IS, the DTYPE of its feeds (0: it is of the heap's floats).
NAME, RANK, PER_SAMPLE, PLACE, CLASSES, IGNORED, EXACT, AS_IT_IS, DIMS = range(9)
PLACEHOLDER_WORDS = DIMS + MOST_RANK
METHODS = PLACEHOLDERS + MOST_PLACEHOLDERS * PLACEHOLDER_WORDS
# Words of a method: whether it may be called so, what it does, its placeholders, its results (NAMED: in a dict).  MOST_SAMPLES
# of a call, where several batches are run one after the other; N_INPUTS of its arguments, where those are given apart from
# the others (0: all one by one).
SET, CHANGES, FORGETS, MOST_SAMPLES, NAMED, N_INPUTS, N_ARGUMENTS, N_ANSWERS, N_SPANS_OF, SPANS_OF = range(10)
ROWS_OF = SPANS_OF + 3 * (
    MOST_BEFORE + 1
)  # after (start, stop, brief batch: see `slices.brief_batch`) of paths before it and its own
# After (batch, address of its rows, ns of a call) of some batches, the last the planned one; numbers of placeholders.
ARGUMENTS = ROWS_OF + 3 * (KEPT_ROWS + 1)
RESULTS_OF = ARGUMENTS + MOST_ARGUMENTS
# Words of a result: its offset, elements of a sample, rank, address of its sizes, the object of its name.
SINGLE, MEAN, SUM = -1, -2, -3  # in place of a rank: a single number; one that is of whole data sets a mean, or a sum
RESULT, LENGTH, RESULT_RANK, RESULT_DIMS, RESULT_NAME = range(5)
RESULT_WORDS = 5
METHOD_WORDS = RESULTS_OF + MOST_RESULTS * RESULT_WORDS
SHEET_WORDS = METHODS + N_METHODS * METHOD_WORDS
LONG_NS = 1_000_000  # a call that takes longer is made in Python, where other threads go on meanwhile
