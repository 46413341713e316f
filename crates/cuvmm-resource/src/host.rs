//! Memory of the host, touched by the host itself: by copies and fills that need no driver, and by raw pointer.
//!
//! # Safety
//! Bytes are touched where the driver granted the host to read and write them. That is so for every chunk that a
//! resource of the host's memory maps, whoever made it, as the host is in its access list; but nobody relies on that:
//! each use asks the mappings that it lies in, and each mapping has the list that the driver took. They are mapped as
//! long as the buffer is borrowed, whole pages of the host each, which hold some bytes whether or not any were written.
//!
//! Two threads may copy to and from the same bytes at once, through the same buffer or aliases of it: all of it is safe
//! code. So this never makes a reference to plain bytes, and touches memory only as `AtomicU64`, at multiples of 8:
//! accesses of one size to the same place are no data race. A byte beside those that are written keeps what it has, also
//! what another thread writes meanwhile: the word that it is in is exchanged only if it is what was read. What GPUs,
//! other processes, and the driver's own copies do to the memory happens outside of Rust's memory model; to this
//! process it is as if another thread had stored it. Which of two racing writers a byte is from, and where in the midst
//! of it a racing reader looks, is not defined; that is a matter of the bytes' meaning and not of soundness.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering, fence};

use cuvmm_driver::sys::{CUmemAccess_flags, CUmemAccessDesc};

use crate::buffer::VirtualMemoryBuffer;
use crate::error::Error;
use crate::memory::is_host;

/// The bytes of a word.
const WORD: usize = size_of::<AtomicU64>();

impl VirtualMemoryBuffer {
    /// Where the host finds its bytes, for memory of the host: at its own address. None for memory of a device, for an
    /// empty buffer, and in a process that was forked from this one, which the memory is not for.
    ///
    /// Having the pointer is safe. Whoever reads or writes there sees to it that the buffer lives, and that it is no data
    /// race with what else touches the memory: copies and fills of buffers without a stream do so by relaxed atomic
    /// accesses of 8 bytes at multiples of 8.
    ///
    /// ```
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let device = simulator.driver()?.device(0)?;
    /// let resource = VirtualMemoryResource::new(&device, Options::new().location(Location::Host))?;
    /// let buffer = resource.allocate(2 << 20)?;
    /// let pointer = buffer.host_pointer().ok_or("memory of the host")?;
    /// assert_eq!(pointer.expose_provenance() as u64, buffer.address().0);
    /// // SAFETY: nobody else knows of the memory yet.
    /// unsafe { pointer.write_bytes(7, 100) };
    /// let mut bytes = [0; 3];
    /// buffer.copy_to_host(98, &mut bytes)?;
    /// assert_eq!(bytes[..2], [7, 7]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn host_pointer(&self) -> Option<*mut u8> {
        let is_touchable = !self.is_empty() && self.is_granted_to_host(0, self.size()) && !self.driver().is_forked();
        is_touchable.then(|| std::ptr::with_exposed_provenance_mut(self.address().0 as usize))
    }

    /// Its bytes, for memory of the host; none where there is no [`host_pointer`](Self::host_pointer).
    ///
    /// ```
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let device = simulator.driver()?.device(0)?;
    /// let resource = VirtualMemoryResource::new(&device, Options::new().location(Location::Host))?;
    /// let buffer = resource.allocate_zeroed(2 << 20)?;
    /// // SAFETY: nobody writes to the memory: nobody else has it, and no copy or fill is made while the slice lives.
    /// let bytes = unsafe { buffer.as_slice() }.ok_or("memory of the host")?;
    /// assert!(bytes.iter().all(|byte| *byte == 0));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Safety
    /// While the slice lives, nobody writes to its bytes, nor to those up to the next multiple of 8 behind it: no copy or
    /// fill of this buffer or another over the same memory (such as it was grown from or into, or imported elsewhere),
    /// no `as_mut_slice` of one, no GPU, no peer, and no other process. So the slice can't be what is copied into the
    /// same memory.
    pub unsafe fn as_slice(&self) -> Option<&[u8]> {
        let pointer = self.host_pointer()?;
        // SAFETY: the host may read these bytes, which are mapped while `self` is borrowed, at addresses of their own,
        // and hold some value each. Nobody writes to them meanwhile, by the caller's promise.
        Some(unsafe { std::slice::from_raw_parts(pointer, self.size()) })
    }

    /// Its bytes, to be written too, for memory of the host; none where there is no
    /// [`host_pointer`](Self::host_pointer). Work that is to see what was written is launched after the slice is gone.
    ///
    /// ```
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let device = simulator.driver()?.device(0)?;
    /// let resource = VirtualMemoryResource::new(&device, Options::new().location(Location::Host))?;
    /// let mut buffer = resource.allocate(2 << 20)?;
    /// // SAFETY: nobody else has the memory.
    /// let bytes = unsafe { buffer.as_mut_slice() }.ok_or("memory of the host")?;
    /// bytes[..4].copy_from_slice(b"text");
    /// let mut copy = [0; 4];
    /// buffer.copy_to_host(0, &mut copy)?;
    /// assert_eq!(&copy, b"text");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Safety
    /// While the slice lives, nobody but through it reads or writes its bytes, nor those up to the next multiple of 8
    /// behind it: no copy or fill of a buffer over the same memory (such as this one was grown from or into, or imported
    /// elsewhere), no slice of one, no GPU, no peer, and no other process.
    pub unsafe fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        let pointer = self.host_pointer()?;
        // SAFETY: the host may write these bytes, which are mapped while `self` is borrowed, at addresses of their own,
        // and hold some value each. Nobody else touches them meanwhile, by the caller's promise.
        Some(unsafe { std::slice::from_raw_parts_mut(pointer, self.size()) })
    }

    /// The words that the bytes from `start` to `end` lie in, which are mapped; none where the host may not touch them.
    ///
    /// # Errors
    /// [`Error::Forked`]: nothing may even refer to memory that is not mapped.
    pub(crate) fn words(&self, start: usize, end: usize) -> Result<Option<Words<'_>>, Error> {
        if start >= end || !self.is_granted_to_host(start, end) {
            return Ok(None);
        }
        if self.driver().is_forked() {
            return Err(Error::Forked);
        }
        let Some(address) = self.address().checked_add(start) else { return Ok(None) };
        let (skip, bytes) = (address.0 as usize % WORD, end - start);
        let first = std::ptr::with_exposed_provenance::<AtomicU64>(address.0 as usize - skip);
        // SAFETY: the words are aligned, and lie in the pages that the bytes lie in. Those are mapped while `self` is
        // borrowed, in this process, and the host may write them. It does so through atomic words alone, unless somebody
        // promised that nothing else is under way, and what others than this process's threads write is no access of
        // Rust's.
        let words = unsafe { std::slice::from_raw_parts(first, (skip + bytes).div_ceil(WORD)) };
        Ok(Some(Words { words, skip, bytes }))
    }

    /// Whether these bytes are memory of the host that the host was granted to read and write.
    fn is_granted_to_host(&self, start: usize, end: usize) -> bool {
        let is_hosts = |desc: &CUmemAccessDesc| is_host(desc.location) && desc.flags == CUmemAccess_flags::READWRITE;
        self.resource().location().is_host()
            && self.range().is_granted(start, end, |access| access.iter().any(is_hosts))
    }
}

/// Bytes of the host's memory, as the words that they lie in. Other threads may write there.
pub(crate) struct Words<'a> {
    /// Each has a byte of theirs at least.
    words: &'a [AtomicU64],
    /// How many bytes of the first are before them.
    skip: usize,
    /// How many there are.
    bytes: usize,
}

impl Words<'_> {
    /// Copies `source`, of as many bytes, there.
    pub(crate) fn write(&self, source: &[u8]) {
        let (head, rest) = source.split_at(self.head().min(source.len()));
        let (whole, tail) = rest.as_chunks();
        self.store(head, whole.iter().copied(), tail);
    }

    /// Sets every byte.
    pub(crate) fn fill(&self, value: u8) {
        let word = [value; WORD];
        let rest = self.bytes - self.head();
        self.store(&word[..self.head()], std::iter::repeat_n(word, rest / WORD), &word[..rest % WORD]);
    }

    /// Copies them to `destination`, of as many bytes.
    pub(crate) fn read(&self, destination: &mut [u8]) {
        let (head, rest) = destination.split_at_mut(self.head().min(destination.len()));
        let mut words = self.words.iter().map(|word| word.load(Ordering::Relaxed).to_ne_bytes());
        if !head.is_empty()
            && let Some(word) = words.next()
        {
            head.copy_from_slice(&word[self.skip..][..head.len()]);
        }
        let (whole, tail) = rest.as_chunks_mut();
        for (bytes, word) in whole.iter_mut().zip(&mut words) {
            *bytes = word;
        }
        if let Some(word) = words.next() {
            tail.copy_from_slice(&word[..tail.len()]);
        }
        // What was written before what is seen here is seen by later copies: see `store`.
        fence(Ordering::Acquire);
    }

    /// How many of the bytes are in a first word that begins before them.
    fn head(&self) -> usize {
        ((WORD - self.skip) % WORD).min(self.bytes)
    }

    /// Stores them: those of a first word that begins before them, whole words, and those of a last one.
    fn store(&self, head: &[u8], whole: impl Iterator<Item = [u8; WORD]>, tail: &[u8]) {
        // Whoever sees what is stored here, by a copy of ours, or on a GPU by an acquire of the system's scope, sees what
        // this thread stored before: data, and then the flag that tells of it.
        fence(Ordering::Release);
        let mut words = self.words.iter();
        if !head.is_empty()
            && let Some(word) = words.next()
        {
            exchange(word, self.skip, head);
        }
        for (bytes, word) in whole.zip(&mut words) {
            word.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
        }
        if let Some(word) = words.next() {
            exchange(word, 0, tail);
        }
    }
}

/// Replaces the bytes from `at` on, and no other of the word.
fn exchange(word: &AtomicU64, at: usize, part: &[u8]) {
    let with = |word: u64| {
        let mut bytes = word.to_ne_bytes();
        bytes[at..][..part.len()].copy_from_slice(part);
        Some(u64::from_ne_bytes(bytes))
    };
    // It is always replaced, by trying again where another thread was faster.
    let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, with);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does `work` on all runs of bytes of some words, which must do to them what `expect` does, and nothing beside them.
    fn check(work: impl Fn(&Words<'_>), expect: impl Fn(&mut [u8])) {
        const BYTES: usize = 4 * WORD;
        for (start, end) in (0..BYTES).flat_map(|start| (start + 1..=BYTES).map(move |end| (start, end))) {
            let mut bytes: [u8; BYTES] = std::array::from_fn(|index| index as u8 + 100);
            let memory: Vec<AtomicU64> =
                bytes.as_chunks().0.iter().map(|word| AtomicU64::new(u64::from_ne_bytes(*word))).collect();
            let words = &memory[start / WORD..end.div_ceil(WORD)];
            work(&Words { words, skip: start % WORD, bytes: end - start });
            expect(&mut bytes[start..end]);
            let seen: Vec<u8> = memory.into_iter().flat_map(|word| word.into_inner().to_ne_bytes()).collect();
            assert_eq!(seen, bytes, "{start} to {end}");
        }
    }

    #[test]
    fn bytes_are_written_and_those_beside_them_are_not() {
        let source: Vec<u8> = (1..=50).collect();
        check(|words| words.write(&source[..words.bytes]), |bytes| bytes.copy_from_slice(&source[..bytes.len()]));
        check(|words| words.fill(7), |bytes| bytes.fill(7));
    }

    #[test]
    fn the_bytes_that_are_there_are_read() {
        check(
            |words| {
                let mut seen = vec![0; words.bytes];
                words.read(&mut seen);
                assert!(seen.iter().zip(&seen[1..]).all(|(one, next)| one + 1 == *next) && seen[0] >= 100);
                // Once more into the memory, so that what was read is compared too.
                words.write(&seen);
            },
            |_| (),
        );
    }
}
