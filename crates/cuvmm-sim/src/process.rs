//! The number of this process, without asking the kernel at each call.
//!
//! It is kept in a page that the kernel wipes in a forked child, however that was made.
//!
//! # Safety
//! The page is mapped for good, and only ever used as the one atomic number at its start.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

const PAGE: usize = 4096;

/// The page; null before the first simulator, and where the kernel can't wipe.
static KEPT: AtomicPtr<AtomicU32> = AtomicPtr::new(std::ptr::null_mut());

/// The number of this process.
pub(crate) fn id() -> u32 {
    // SAFETY: null, or the page, which is never unmapped, aligned, and zero or a number.
    let Some(kept) = (unsafe { KEPT.load(Ordering::Acquire).as_ref() }) else { return std::process::id() };
    match kept.load(Ordering::Relaxed) {
        0 => {
            let id = std::process::id();
            kept.store(id, Ordering::Relaxed);
            id
        }
        id => id,
    }
}

/// Makes [`id`] cheap from now on, if the kernel can. Nothing here waits, so that no fork can come in between.
pub(crate) fn keep_id() {
    if !KEPT.load(Ordering::Acquire).is_null() {
        return;
    }
    let Some(page) = wiped_page() else { return };
    if KEPT.compare_exchange(std::ptr::null_mut(), page, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: another thread was first; nobody else knows of this page.
        let _ = unsafe { rustix::mm::munmap(page.cast(), PAGE) };
    }
}

/// A page of zeros that is zeros again in a forked child.
fn wiped_page() -> Option<*mut AtomicU32> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping wherever the kernel likes.
    let page = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), PAGE, access, MapFlags::PRIVATE) }.ok()?;
    // SAFETY: the page is ours, and what it loses in a child is a number that is asked for again.
    if unsafe { rustix::mm::madvise(page, PAGE, Advice::LinuxWipeOnFork) }.is_err() {
        // SAFETY: the page is ours, and nobody knows of it.
        let _ = unsafe { rustix::mm::munmap(page, PAGE) };
        return None;
    }
    Some(page.cast())
}
