//! What the random calls know of a driver: what they were given by it, and numbers.
//!
//! # Safety
//! The buffers of the process are only ever pointed to, never looked at.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use cuvmm_driver::Call;
use cuvmm_driver::sys::*;
use cuvmm_sim::Simulator;

use crate::support::EMPTY;

pub(crate) const CHUNK: u64 = 64 << 10;
/// The bytes of the buffers that copies use: work can still hold on to them after the call.
pub(crate) const BUFFER: usize = 64 << 10;
/// How many values of a kind are remembered.
const REMEMBERED: usize = 256;

static SOURCE: [u8; BUFFER + 1] = {
    let mut bytes = [7; BUFFER + 1];
    // What is read as text ends.
    bytes[BUFFER] = 0;
    bytes
};

static SINK: [AtomicUsize; BUFFER / 8] = [const { AtomicUsize::new(0) }; BUFFER / 8];

/// Where host memory is read.
pub(crate) fn source() -> *const c_void {
    SOURCE.as_ptr().cast()
}

/// Where host memory is written: through interior mutability, and by raw pointers alone.
pub(crate) fn sink() -> *mut c_void {
    SINK.as_ptr().cast_mut().cast()
}

/// The driver that host functions call.
pub(crate) static DRIVER: Mutex<Option<Simulator>> = Mutex::new(None);
/// How many calls they made.
pub(crate) static INSIDE: AtomicUsize = AtomicUsize::new(0);

/// Makes calls where none may be made.
pub(crate) unsafe extern "C" fn host_function(_data: *mut c_void) {
    let driver = DRIVER.lock().map_or(None, |driver| driver.clone());
    let Some(driver) = driver else { return };
    for _ in 0..3 {
        let index = INSIDE.fetch_add(1, Ordering::Relaxed);
        EMPTY[index % EMPTY.len()].1(&driver);
    }
}

/// Numbers that look random, by a seed.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 11) % limit
    }

    pub(crate) fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }
}

/// What the driver gave, to all threads.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) addresses: Vec<u64>,
    pub(crate) handles: Vec<u64>,
    pub(crate) contexts: Vec<u64>,
    pub(crate) streams: Vec<u64>,
    pub(crate) events: Vec<u64>,
    pub(crate) graphs: Vec<u64>,
    pub(crate) nodes: Vec<u64>,
    pub(crate) executables: Vec<u64>,
    pub(crate) objects: Vec<u64>,
    pub(crate) modules: Vec<u64>,
    pub(crate) functions: Vec<u64>,
    exported: Vec<Arc<OwnedFd>>,
    fabric: Vec<[u8; 64]>,
}

/// What happens to a pointer's values after the call, which succeeded or not.
type Written = Box<dyn FnOnce(&mut World<'_>, bool)>;

/// One thread's way through the calls.
pub(crate) struct World<'a> {
    pub(crate) numbers: Numbers,
    pub(crate) call: Call,
    /// The name of the argument that is made.
    pub(crate) argument: &'static str,
    /// Whether what is imported is given as a number, and so must not be taken for a pointer.
    pub(crate) is_number: bool,
    pub(crate) written: Vec<Written>,
    seen: &'a Mutex<Seen>,
    /// Mapped for good, and granted to device 0.
    lasting: u64,
}

impl<'a> World<'a> {
    pub(crate) fn new(seed: u64, seen: &'a Mutex<Seen>, lasting: u64) -> Self {
        let (call, argument) = (Call::cuInit, "");
        Self { numbers: Numbers::new(seed), call, argument, is_number: false, written: Vec::new(), seen, lasting }
    }

    /// One of what was seen before, something near it, or nonsense.
    pub(crate) fn like(&mut self, list: impl Fn(&Seen) -> &Vec<u64>) -> u64 {
        let known = self.one_of(list);
        match self.numbers.below(16) {
            0 => self.numbers.next(),
            1 => 0,
            2 => known.wrapping_add(CHUNK * self.numbers.below(4)),
            3 => known.wrapping_add(self.numbers.below(4096)),
            _ => known,
        }
    }

    /// One of what was seen before, or 0.
    pub(crate) fn one_of(&mut self, list: impl Fn(&Seen) -> &Vec<u64>) -> u64 {
        let Ok(seen) = self.seen.lock() else { return 0 };
        let all = list(&seen);
        // What is old is mostly dead.
        let recent = if self.numbers.one_in(4) { all } else { &all[all.len().saturating_sub(6)..] };
        if recent.is_empty() { 0 } else { recent[self.numbers.below(recent.len() as u64) as usize] }
    }

    pub(crate) fn keep(&self, list: impl Fn(&mut Seen) -> &mut Vec<u64>, value: u64) {
        if let Ok(mut seen) = self.seen.lock() {
            let all = list(&mut seen);
            all.push(value);
            if all.len() > REMEMBERED {
                all.drain(..REMEMBERED / 2);
            }
        }
    }

    pub(crate) fn size(&mut self) -> usize {
        match self.numbers.below(12) {
            0 => self.numbers.next() as usize,
            1 => 0,
            2 => self.numbers.below(100_000) as usize,
            _ => (CHUNK * (1 + self.numbers.below(4))) as usize,
        }
    }

    /// An address that is never the host's.
    pub(crate) fn unified(&mut self) -> CUdeviceptr {
        CUdeviceptr(if self.numbers.one_in(8) { 0 } else { self.lasting + self.numbers.below(4096) })
    }

    pub(crate) fn exported(&self) -> Option<Arc<OwnedFd>> {
        self.seen.lock().ok()?.exported.last().cloned()
    }

    pub(crate) fn fabric(&self) -> Option<[u8; 64]> {
        self.seen.lock().ok()?.fabric.last().copied()
    }

    /// Keeps what an export wrote: a descriptor where nothing follows it.
    pub(crate) fn keep_shared(&self, bytes: [u8; 64]) {
        let Ok(mut seen) = self.seen.lock() else { return };
        if bytes[4..].iter().any(|&byte| byte != 0xFF) {
            seen.fabric.truncate(3);
            return seen.fabric.push(bytes);
        }
        let number = i32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        if number > 2 {
            // Only so many stay open.
            seen.exported.truncate(7);
            // SAFETY: the driver opened it for its caller.
            seen.exported.push(Arc::new(unsafe { OwnedFd::from_raw_fd(number) }));
        }
    }
}
