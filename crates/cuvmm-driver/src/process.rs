//! The number of this process, without asking the kernel each time, and values that each process has of its own.
//!
//! The number is kept in a page that the kernel wipes in a forked child, however that was made.
//!
//! # Safety
//! * The page is mapped for good, and only ever used as the one atomic number at its start.
//! * An [`OfProcess`] is null or what was made for one, which is never freed.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_long, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

const PAGE: usize = 4096;

/// The page; null before it is first needed, [`NO_PAGE`] where the kernel can't wipe.
static KEPT: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
static NO_PAGE: AtomicU32 = AtomicU32::new(0);

/// The number of this process, as [`std::process::id`] has it, but without a system call: right also in a forked child,
/// so that whoever keeps it can tell at any call whether it was forked since.
///
/// ```
/// assert_eq!(cuvmm_driver::process_id(), std::process::id());
/// ```
#[inline]
pub fn process_id() -> u32 {
    let kept = KEPT.load(Ordering::Acquire);
    // SAFETY: null, the static, or the page, which is never unmapped, aligned, and zero or a number.
    match unsafe { kept.as_ref() }.map_or(0, |number| number.load(Ordering::Relaxed)) {
        0 => ask(),
        id => id,
    }
}

/// Asks the kernel, and keeps what it says.
#[cold]
fn ask() -> u32 {
    let mut kept = KEPT.load(Ordering::Acquire);
    if kept.is_null() {
        kept = keep();
    }
    let id = std::process::id();
    if !ptr::eq(kept, &raw const NO_PAGE) {
        // SAFETY: the page, which is never unmapped, and aligned.
        unsafe { &*kept }.store(id, Ordering::Relaxed);
    }
    id
}

/// A value that each process has of its own, made when it is first asked for and never dropped.
///
/// A forked child has none of its parent's threads, and may have found its locks held for ever. So it gets another value
/// than its parent's, and waits for nothing on the way.
///
/// ```
/// use std::sync::Mutex;
///
/// use cuvmm_driver::OfProcess;
///
/// static NAMES: OfProcess<Mutex<Vec<String>>> = OfProcess::new();
///
/// assert!(NAMES.get().is_none());
/// NAMES.get_or_make(Mutex::default).lock().unwrap().push("first".to_owned());
/// assert_eq!(NAMES.get().map(|names| names.lock().unwrap().len()), Some(1));
/// ```
#[derive(Debug)]
pub struct OfProcess<T: 'static>(AtomicPtr<Made<T>>);

struct Made<T> {
    process: u32,
    value: T,
}

impl<T: Sync + 'static> OfProcess<T> {
    /// One that no process has a value of yet.
    pub const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// This process's value, if it has been made.
    pub fn get(&self) -> Option<&'static T> {
        self.made().ok()
    }

    /// This process's value. Where several threads make one at once, all get the same, and the others' are dropped.
    pub fn get_or_make(&self, make: impl Fn() -> T) -> &'static T {
        loop {
            match self.made() {
                Ok(value) => return value,
                Err(known) => {
                    let made = Box::into_raw(Box::new(Made { process: process_id(), value: make() }));
                    if self.0.compare_exchange(known, made, Ordering::AcqRel, Ordering::Acquire).is_err() {
                        // SAFETY: it was made just now, and another thread was first: nobody knows of it.
                        drop(unsafe { Box::from_raw(made) });
                    }
                }
            }
        }
    }

    /// This process's value, or what is there in its place.
    fn made(&self) -> Result<&'static T, *mut Made<T>> {
        let known = self.0.load(Ordering::Acquire);
        // SAFETY: it is null, or a value that is never freed.
        let made = unsafe { known.as_ref() }.filter(|made| made.process == process_id());
        made.map(|made| &made.value).ok_or(known)
    }
}

impl<T: Sync + 'static> Default for OfProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// Makes the page, if the kernel can wipe one. Nothing here waits, so that no fork can come in between.
fn keep() -> *mut AtomicU32 {
    let made = wiped_page().unwrap_or_else(|| (&raw const NO_PAGE).cast_mut());
    match KEPT.compare_exchange(ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => made,
        Err(first) => {
            if !ptr::eq(made, &raw const NO_PAGE) {
                // SAFETY: another thread was first; nobody else knows of this page.
                unsafe { munmap(made.cast(), PAGE) };
            }
            first
        }
    }
}

/// A page of zeros that is zeros again in a forked child.
fn wiped_page() -> Option<*mut AtomicU32> {
    // SAFETY: a new mapping wherever the kernel likes.
    let page = unsafe { mmap(ptr::null_mut(), PAGE, READ | WRITE, PRIVATE | ANONYMOUS, -1, 0) };
    if page.addr() == FAILED {
        return None;
    }
    // SAFETY: the page is ours, and what it loses in a child is a number that is asked for again.
    if unsafe { madvise(page, PAGE, WIPE_ON_FORK) } != 0 {
        // SAFETY: the page is ours, and nobody knows of it.
        unsafe { munmap(page, PAGE) };
        return None;
    }
    Some(page.cast())
}

// Linux's numbers on x86-64 and aarch64; the C library is there in any program of the standard library's.
const READ: c_int = 1;
const WRITE: c_int = 2;
const PRIVATE: c_int = 2;
const ANONYMOUS: c_int = 0x20;
const WIPE_ON_FORK: c_int = 18;
const FAILED: usize = usize::MAX;

unsafe extern "C" {
    fn mmap(at: *mut c_void, size: usize, access: c_int, flags: c_int, file: c_int, offset: c_long) -> *mut c_void;
    fn madvise(at: *mut c_void, size: usize, advice: c_int) -> c_int;
    fn munmap(at: *mut c_void, size: usize) -> c_int;
}
