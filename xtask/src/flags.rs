//! The command line.

use std::path::PathBuf;

xflags::xflags! {
    /// The tasks of the cuvmm workspace.
    cmd xtask {
        /// What continuous integration checks: format, lints, tests, models, instructions, interoperation, documentation,
        /// dependencies.
        cmd ci {}
        /// Run the suites that need a GPU, here or, with --bundle, on a machine without cargo.
        cmd gpu-test {
            /// Write the suites and their runner to this folder instead of running them.
            optional --bundle dir: PathBuf
            /// Leave what the conformance suite was answered in this folder.
            optional --report dir: PathBuf
        }
        /// Measure what buffers cost, and write docs/benchmarks.md: our own cost, and with CUVMM_DRIVER=cuda that on a GPU.
        cmd bench {
            /// Measure nothing, and take what the benchmarks of a bundle left elsewhere: lists of rows, or criterion's folder.
            optional --from
            /// Measure our own cost alone.
            optional --own
            /// What --from reads.
            repeated file: PathBuf
        }
        /// Count the instructions of what our own code does, and hold them to their budgets. Wants valgrind.
        cmd instructions {}
        /// Run programs that are not ours on the stand-in library of the simulated driver.
        cmd interop {}
        /// Run the models of what threads share, in many orders of the threads' steps.
        cmd shuttle {
            /// How many orders each model is run in, by each scheduler.
            optional --schedules schedules: u64
            /// What they follow from.
            optional --seed seed: u64
        }
        /// Make random calls on the simulated driver, and try buffers against their model: many, with several seeds.
        cmd soak {
            /// How many calls each machine gets; 0 for none at all.
            optional --calls calls: u64
            /// How many cases of buffers are tried with each seed; 0 for none at all.
            optional --cases cases: u64
            /// The first seed.
            optional --seed seed: u64
            /// How many seeds.
            optional --seeds seeds: u64
        }
        /// Have the fuzzer make up bytes and peers for what reads and receives buffer descriptors.
        cmd fuzz {
            /// How many inputs each target gets.
            optional --runs runs: u64
            /// Try this one input, which failed once, instead.
            optional --again file: PathBuf
            /// The target: wire, receive or send; all of them where none is named.
            optional target: String
        }
        /// Run the tests of what threads share under ThreadSanitizer. Wants a nightly toolchain.
        cmd tsan {}
        /// Check the rules that the workspace holds itself to.
        cmd tidy {}
        /// Package every crate as for publishing, and build each from its package.
        cmd release {
            /// Upload nothing. Publishing itself is done by hand.
            required --dry-run
        }
    }
}
