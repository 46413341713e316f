//! What there should be: memory and what it holds, where it is mapped, and the buffers over it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use cuvmm::{BufferDescriptor, Outcome, VirtualMemoryBuffer};

use crate::world::{PAGE, World};

/// A piece of physical memory.
pub(crate) struct Memory {
    pub(crate) size: usize,
    /// What every byte reads as that nobody wrote; none where it may have been another buffer's.
    fresh: Option<u8>,
    /// The pages that were written. Each page has one thread that writes and reads it.
    pages: Mutex<BTreeMap<usize, Page>>,
}

#[derive(Clone)]
enum Page {
    Holds(Vec<u8>),
    /// A write failed, which may have been made all the same, or nobody wrote what a former buffer left.
    Unknown,
}

impl Memory {
    /// What a page should hold; none where that is not known.
    pub(crate) fn page(&self, page: usize) -> Option<Vec<u8>> {
        match self.pages.lock().unwrap().get(&page) {
            Some(Page::Holds(bytes)) => Some(bytes.clone()),
            Some(Page::Unknown) => None,
            None => self.fresh.map(|fresh| vec![fresh; PAGE]),
        }
    }

    /// The pages that were written, and those at its ends.
    fn pages_of_interest(&self) -> Vec<usize> {
        let mut pages: Vec<usize> = self.pages.lock().unwrap().keys().copied().collect();
        pages.extend([0, self.size / PAGE - 1]);
        pages
    }

    fn write(&self, offset: usize, source: &[u8]) {
        let mut pages = self.pages.lock().unwrap();
        let mut at = offset;
        let mut rest = source;
        while !rest.is_empty() {
            let (head, tail) = rest.split_at(rest.len().min(PAGE - at % PAGE));
            let unwritten = || self.fresh.map_or(Page::Unknown, |fresh| Page::Holds(vec![fresh; PAGE]));
            let page = pages.entry(at / PAGE).or_insert_with(unwritten);
            match page {
                Page::Holds(bytes) => bytes[at % PAGE..][..head.len()].copy_from_slice(head),
                Page::Unknown if head.len() == PAGE => *page = Page::Holds(head.to_vec()),
                Page::Unknown => {}
            }
            (at, rest) = (at + head.len(), tail);
        }
    }

    fn forget(&self, offset: usize, bytes: usize) {
        let mut pages = self.pages.lock().unwrap();
        for page in offset / PAGE..(offset + bytes).div_ceil(PAGE) {
            pages.insert(page, Page::Unknown);
        }
    }
}

/// A reference to memory that the driver gave out.
pub(crate) struct Handle {
    pub(crate) memory: Arc<Memory>,
    pub(crate) is_imported: bool,
}

/// A place where memory is mapped.
pub(crate) struct Place {
    pub(crate) handle: Arc<Handle>,
}

impl Place {
    fn of(handle: &Arc<Handle>) -> Arc<Self> {
        Arc::new(Self { handle: Arc::clone(handle) })
    }

    /// New memory at a new place.
    fn fresh(size: usize, fresh: Option<u8>) -> Arc<Self> {
        let memory = Arc::new(Memory { size, fresh, pages: Mutex::default() });
        Self::of(&Arc::new(Handle { memory, is_imported: false }))
    }

    pub(crate) fn size(&self) -> usize {
        self.handle.memory.size
    }
}

/// A buffer, and what it should be.
pub(crate) struct Modelled {
    pub(crate) buffer: VirtualMemoryBuffer,
    pub(crate) size: usize,
    /// Where each of its chunks is mapped, those behind its size among them.
    pub(crate) places: Vec<Arc<Place>>,
}

/// Where the last of so many places ends.
pub(crate) fn end_of(places: &[Arc<Place>]) -> usize {
    places.iter().map(|place| place.size()).sum()
}

impl Modelled {
    /// A buffer of new memory.
    pub(crate) fn allocated(buffer: VirtualMemoryBuffer, fresh: Option<u8>) -> Self {
        let places = buffer.chunks().iter().map(|chunk| Place::fresh(chunk.size, fresh)).collect();
        Self { size: buffer.size(), buffer, places }
    }

    /// The size that growing to `wanted` bytes gives.
    pub(crate) fn size_when_grown(&self, wanted: usize, granularity: usize) -> usize {
        let (rounded, end) = (wanted.next_multiple_of(granularity), end_of(&self.places));
        if wanted <= self.size {
            self.size
        } else if wanted <= end {
            rounded.min(end)
        } else {
            rounded
        }
    }

    /// What `buffer` should be, which one with these places became by growing to `size`.
    pub(crate) fn grown(places: &[Arc<Place>], size: usize, buffer: VirtualMemoryBuffer, fresh: Option<u8>) -> Self {
        let end = end_of(places);
        let outcome = buffer.outcome().unwrap();
        assert_eq!(outcome == Outcome::Covered, size <= end, "covered exactly when it can be");
        assert_eq!(buffer.size(), size);
        let mut places = places.to_vec();
        if outcome == Outcome::Moved {
            places = places.iter().map(|place| Place::of(&place.handle)).collect();
        }
        // What was added is what lies behind, and all of it begins within the size.
        let mut at = 0;
        for chunk in buffer.chunks().iter().filter(|_| size > end) {
            if at >= end {
                places.push(Place::fresh(chunk.size, fresh));
            }
            at += chunk.size;
        }
        Self { buffer, size, places }
    }

    /// The places that the first `size` bytes are at.
    pub(crate) fn head(&self, size: usize) -> Vec<Arc<Place>> {
        let mut places = Vec::new();
        for place in &self.places {
            if end_of(&places) >= size {
                break;
            }
            places.push(Arc::clone(place));
        }
        places
    }

    pub(crate) fn imported(buffer: VirtualMemoryBuffer, shared: &Shared) -> Self {
        let handle = |memory: &Arc<Memory>| Arc::new(Handle { memory: Arc::clone(memory), is_imported: true });
        let places = shared.memories.iter().map(|memory| Place::of(&handle(memory))).collect();
        assert_eq!(buffer.size(), shared.size);
        Self { size: shared.size, buffer, places }
    }

    pub(crate) fn write(&self, offset: usize, source: &[u8]) {
        self.each_part(offset, source.len(), |memory, at, from, length| memory.write(at, &source[from..][..length]));
    }

    /// Nobody knows any more what these bytes are.
    pub(crate) fn forget(&self, offset: usize, bytes: usize) {
        self.each_part(offset, bytes, |memory, at, _, length| memory.forget(at, length));
    }

    /// Calls `part` for the part of each memory that `bytes` bytes from `offset` on lie in: where in the memory, where
    /// in the bytes, and how many.
    fn each_part(&self, offset: usize, bytes: usize, mut part: impl FnMut(&Memory, usize, usize, usize)) {
        let mut at = 0;
        for place in &self.places {
            let (from, until) = (at.max(offset), (at + place.size()).min(offset + bytes));
            if from < until {
                part(&place.handle.memory, from - at, from - offset, until - from);
            }
            at += place.size();
        }
    }

    /// Demands that it is what it should be, and holds what it should in all pages that are `mine`.
    pub(crate) fn check(&self, world: &World, mine: impl Fn(usize) -> bool) {
        let buffer = &self.buffer;
        let (start, size) = (buffer.address(), self.size);
        assert_eq!((buffer.size(), buffer.is_empty()), (size, size == 0));
        assert!(buffer.capacity() >= end_of(&self.places) && buffer.capacity() >= size, "{buffer:?}");
        let chunks = buffer.chunks();
        let mut at = 0;
        for (place, chunk) in self.places.iter().zip(&chunks) {
            assert_eq!((chunk.address.0, chunk.size), (start.0 + at as u64, place.size()), "no gap in {buffer:?}");
            let pages = place.handle.memory.pages_of_interest().into_iter();
            for page in pages.filter(|page| mine(*page) && at + (page + 1) * PAGE <= size) {
                let Some(expect) = place.handle.memory.page(page) else { continue };
                let seen = world.simulator.peek(start.checked_add(at + page * PAGE).unwrap(), PAGE).unwrap();
                assert!(seen == expect, "page {page} of the chunk at {at:#x} of {buffer:?}");
            }
            at += place.size();
        }
        assert!(at >= size && chunks.len() <= self.places.len(), "{chunks:?} in {buffer:?}");
    }
}

/// What was exported, and what importing it should give.
pub(crate) struct Shared {
    pub(crate) descriptor: BufferDescriptor,
    pub(crate) memories: Vec<Arc<Memory>>,
    size: usize,
}

impl Shared {
    pub(crate) fn new(from: &Modelled, descriptor: BufferDescriptor) -> Self {
        let places = from.head(from.size);
        let memories: Vec<_> = places.iter().map(|place| Arc::clone(&place.handle.memory)).collect();
        assert_eq!(descriptor.sizes(), memories.iter().map(|memory| memory.size).collect::<Vec<_>>());
        Self { descriptor, memories, size: from.size }
    }
}

/// How often each way of ending was seen, in all cases.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) covered: AtomicUsize,
    pub(crate) in_place: AtomicUsize,
    pub(crate) moved: AtomicUsize,
    pub(crate) imported: AtomicUsize,
    pub(crate) shrunk: AtomicUsize,
    pub(crate) queued: AtomicUsize,
    pub(crate) deferred: AtomicUsize,
    pub(crate) failed: AtomicUsize,
    pub(crate) recycled: AtomicUsize,
}

impl Seen {
    pub(crate) fn add(count: &AtomicUsize) {
        Self::add_all(count, 1);
    }

    pub(crate) fn add_all(count: &AtomicUsize, more: usize) {
        count.fetch_add(more, Ordering::Relaxed);
    }

    pub(crate) fn grown(&self, buffer: &VirtualMemoryBuffer) {
        match buffer.outcome() {
            Some(Outcome::Covered) => Self::add(&self.covered),
            Some(Outcome::InPlace) => Self::add(&self.in_place),
            Some(Outcome::Moved) => Self::add(&self.moved),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn counts(&self) -> [(&'static str, usize); 9] {
        let read = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        [
            ("covered", read(&self.covered)),
            ("in place", read(&self.in_place)),
            ("moved", read(&self.moved)),
            ("imported", read(&self.imported)),
            ("shrunk", read(&self.shrunk)),
            ("queued", read(&self.queued)),
            ("deferred", read(&self.deferred)),
            ("failed", read(&self.failed)),
            ("recycled", read(&self.recycled)),
        ]
    }
}
