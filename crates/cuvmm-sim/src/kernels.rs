//! Test kernels as PTX text: what a simulated driver can run, and a GPU's driver compiles.
//!
//! A simulated driver has no compiler. It knows these kernels by their text, and refuses every other one.
//!
//! ```
//! use cuvmm_driver::sys::*;
//! use cuvmm_sim::{Machine, Simulator, kernels};
//!
//! let simulator = Simulator::new(Machine::h200());
//! let driver = simulator.driver()?;
//! let stream = CUstream::LEGACY;
//! # let context = driver.device(0)?.primary_ctx_retain()?;
//! # // SAFETY: the context lives as long as it is current, and so does the memory as long as work uses it.
//! # unsafe {
//! # driver.ctx_set_current(context)?;
//! # let mut address = CUdeviceptr(0);
//! # assert!(driver.raw().cuMemAlloc(&raw mut address, 64).is_success());
//! let module = driver.module_load_data(kernels::PTX)?;
//! let fill = driver.module_get_function(module, kernels::FILL)?;
//! let (mut value, mut count) = (7_u32, 16_u64);
//! let mut parameters = [(&raw mut address).cast(), (&raw mut value).cast(), (&raw mut count).cast()];
//! driver.launch_kernel(fill, [1; 3], [32, 1, 1], 0, stream, &mut parameters)?;
//! driver.stream_synchronize(stream)?;
//! assert_eq!(simulator.peek(address, 64).unwrap()[60..], [7, 0, 0, 0]);
//! # }
//! # Ok::<(), cuvmm_driver::Error>(())
//! ```

use std::ffi::CStr;
use std::time::{Duration, Instant};

use cuvmm_driver::CUresult;

use crate::session::Answer;
use crate::simulator::Shared;
use crate::state::Segment;

/// The text of the module with all of them.
pub const PTX: &CStr = match CStr::from_bytes_with_nul(concat!(include_str!("kernels.ptx"), "\0").as_bytes()) {
    Ok(text) => text,
    Err(_) => unreachable!(),
};

/// Writes `value` to each of `count` words at `address`, whatever the grid. Its parameters are `address: u64`,
/// `value: u32` and `count: u64`.
pub const FILL: &CStr = c"fill";

/// Reads each of `count` words at `source`, and writes it at `destination`, whatever the grid. Its parameters are
/// `source: u64`, `destination: u64` and `count: u64`.
pub const READ: &CStr = c"read";

/// Adds 1 to the word at `address`, if that is not 0, over and over until `nanoseconds` have passed. Its parameters are
/// `address: u64` and `nanoseconds: u64`.
pub const SPIN: &CStr = c"spin";

/// The bytes of a word.
const WORD: u64 = 4;
/// How much is done before addresses are looked up again.
const CHUNK: u64 = 1 << 20;
/// How long a spinning kernel rests before it looks again.
const REST: Duration = Duration::from_micros(100);

/// One of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    Fill,
    Read,
    Spin,
}

impl Kernel {
    pub(crate) const ALL: [(&CStr, Self); 3] = [(FILL, Self::Fill), (READ, Self::Read), (SPIN, Self::Spin)];

    /// The bytes of each parameter.
    pub(crate) fn widths(self) -> &'static [usize] {
        match self {
            Self::Fill => &[8, 4, 8],
            Self::Read => &[8, 8, 8],
            Self::Spin => &[8, 8],
        }
    }

    /// The kernel with what it is given, if that is as many values as it has parameters.
    pub(crate) fn with(self, values: &[u64]) -> Option<Task> {
        Some(match (self, values) {
            (Self::Fill, &[address, value, count]) => Task::Fill { address, value: value as u32, count },
            (Self::Read, &[source, destination, count]) => Task::Read { source, destination, count },
            (Self::Spin, &[address, nanoseconds]) => Task::Spin { address, length: Duration::from_nanos(nanoseconds) },
            _ => return None,
        })
    }
}

/// A kernel with what it is given.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Task {
    Fill { address: u64, value: u32, count: u64 },
    Read { source: u64, destination: u64, count: u64 },
    Spin { address: u64, length: Duration },
}

impl Task {
    /// The device addresses that it uses.
    pub(crate) fn spans(self) -> Vec<(u64, u64)> {
        let span = |address: u64, words: u64| (address, address.saturating_add(words.saturating_mul(WORD)));
        match self {
            Self::Fill { address, count, .. } => vec![span(address, count)],
            Self::Read { source, destination, count } => vec![span(source, count), span(destination, count)],
            Self::Spin { address: 0, .. } => Vec::new(),
            Self::Spin { address, .. } => vec![span(address, 1)],
        }
    }
}

/// Where a kernel runs.
#[derive(Clone, Copy)]
pub(crate) struct Site<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) context: u64,
    pub(crate) device: i32,
}

impl Site<'_> {
    /// Runs a kernel as a device does: by what is mapped and granted when it gets there.
    pub(crate) fn run(self, task: Task) -> Answer {
        let ended = match task {
            Task::Fill { address, value, count } => self.fill(address, value, count),
            Task::Read { source, destination, count } => self.read(source, destination, count),
            Task::Spin { address, length } => self.spin(address, length),
        };
        ended.or_else(|stopped| match stopped {
            Stopped::Failed(code) => Err(code),
            Stopped::Ended => Ok(()),
        })
    }

    fn fill(self, address: u64, value: u32, count: u64) -> Result<(), Stopped> {
        let mut done = 0;
        while done < count {
            let segment = self.words(address, done, count, true)?;
            segment.memory.fill(segment.offset, &value.to_ne_bytes(), segment.bytes);
            done += segment.bytes as u64 / WORD;
        }
        Ok(())
    }

    fn read(self, source: u64, destination: u64, count: u64) -> Result<(), Stopped> {
        let mut done = 0;
        while done < count {
            let from = self.words(source, done, count, false)?;
            let to = self.words(destination, done, count, true)?;
            let bytes = from.bytes.min(to.bytes);
            to.memory.copy_from(to.offset, &from.memory, from.offset, bytes);
            done += bytes as u64 / WORD;
        }
        Ok(())
    }

    fn spin(self, address: u64, length: Duration) -> Result<(), Stopped> {
        let start = Instant::now();
        loop {
            if address == 0 {
                drop(self.go_on()?);
            } else {
                let word = self.words(address, 0, 1, true)?;
                let seen = word.memory.bytes_at(word.offset, WORD as usize);
                let seen = seen.try_into().map_or(0, u32::from_ne_bytes);
                word.memory.fill(word.offset, &seen.wrapping_add(1).to_ne_bytes(), WORD as usize);
            }
            match length.checked_sub(start.elapsed()) {
                None | Some(Duration::ZERO) => return Ok(()),
                Some(left) => std::thread::sleep(left.min(REST)),
            }
        }
    }

    /// The memory behind the next words of `count` at `address`, of which some are `done`.
    fn words(self, address: u64, done: u64, count: u64, write: bool) -> Result<Segment, Stopped> {
        if !address.is_multiple_of(WORD) {
            return Err(Stopped::Failed(CUresult::MISALIGNED_ADDRESS));
        }
        let state = self.go_on()?;
        let next = address.wrapping_add(done.wrapping_mul(WORD));
        let bytes = (count - done).saturating_mul(WORD).min(CHUNK);
        let segment = state.segment(next, bytes, self.device, write).filter(|found| found.bytes as u64 >= WORD);
        segment.ok_or(Stopped::Failed(CUresult::ILLEGAL_ADDRESS))
    }

    /// The lock, as long as the driver lives and nothing else broke the context.
    fn go_on(&self) -> Result<std::sync::MutexGuard<'_, crate::state::State>, Stopped> {
        let state = self.shared.lock();
        match state.contexts.get(&self.context) {
            Some(context) if context.error.is_none() => Ok(state),
            _ => Err(Stopped::Ended),
        }
    }
}

/// Why a kernel goes on no more.
enum Stopped {
    /// By its own fault.
    Failed(CUresult),
    /// Its context broke, or is gone with the driver.
    Ended,
}
