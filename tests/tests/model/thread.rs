//! What one thread does, step by step, and what it knows of what comes of it.

use std::time::{Duration, Instant};

use cuvmm::driver::sys::CUdeviceptr;
use cuvmm::ipc::{export, import_from};
use cuvmm::resource::Error;
use cuvmm::{GrowOptions, Release, StreamRef, VirtualMemoryBuffer};
use cuvmm_tests::{hold_up, queue_fill_at, wait_for};
use proptest::prelude::*;

use crate::memory::{Modelled, Seen, Shared};
use crate::world::{G, PAGE, PATIENCE, World, kept};

/// How a buffer grows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How {
    into: bool,
    in_place: bool,
    zeroed: bool,
    /// By another resource's memory.
    by_other: bool,
}

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Allocate {
        units: usize,
        zeroed: bool,
    },
    Reserve {
        units: usize,
        capacity: usize,
        zeroed: bool,
    },
    Grow {
        which: usize,
        units: usize,
        how: How,
    },
    Truncate {
        which: usize,
        size: usize,
        into: bool,
    },
    Close(usize),
    CloseWithin {
        which: usize,
        is_long: bool,
    },
    CloseDeferred(usize),
    Drop(usize),
    Fill {
        which: usize,
        range: (usize, usize),
        value: u8,
    },
    Write {
        which: usize,
        range: (usize, usize),
        seed: u8,
    },
    /// A fill that nobody waits for yet, and a fence behind it.
    Queue {
        which: usize,
        range: (usize, usize),
        value: u8,
    },
    SetRelease(usize),
    Export(usize),
    Import(usize),
    Give(usize),
    Take,
}

pub(crate) fn steps(at_most: usize) -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 1..at_most)
}

fn step() -> impl Strategy<Value = Step> {
    let which = any::<usize>;
    // As a rule within what a buffer's addresses are reserved in, and now and then beyond.
    let units = || prop_oneof![6 => 0..12_usize, 1 => 440..600_usize];
    let range = || (any::<usize>(), any::<usize>());
    let seldom = || prop::bool::weighted(0.2);
    let how = || {
        (any::<bool>(), seldom(), seldom(), seldom()).prop_map(|(into, in_place, zeroed, by_other)| How {
            into,
            in_place,
            zeroed,
            by_other,
        })
    };
    prop_oneof![
        2 => (units(), seldom()).prop_map(|(units, zeroed)| Step::Allocate { units, zeroed }),
        2 => (units(), 0..1200_usize, seldom())
            .prop_map(|(units, capacity, zeroed)| Step::Reserve { units, capacity, zeroed }),
        7 => (which(), units(), how()).prop_map(|(which, units, how)| Step::Grow { which, units, how }),
        2 => (which(), any::<usize>(), any::<bool>())
            .prop_map(|(which, size, into)| Step::Truncate { which, size, into }),
        3 => which().prop_map(Step::Close),
        1 => (which(), any::<bool>()).prop_map(|(which, is_long)| Step::CloseWithin { which, is_long }),
        1 => which().prop_map(Step::CloseDeferred),
        1 => which().prop_map(Step::Drop),
        2 => (which(), range(), any::<u8>()).prop_map(|(which, range, value)| Step::Fill { which, range, value }),
        3 => (which(), range(), any::<u8>()).prop_map(|(which, range, seed)| Step::Write { which, range, seed }),
        3 => (which(), range(), any::<u8>()).prop_map(|(which, range, value)| Step::Queue { which, range, value }),
        1 => which().prop_map(Step::SetRelease),
        2 => which().prop_map(Step::Export),
        2 => which().prop_map(Step::Import),
        1 => which().prop_map(Step::Give),
        1 => Just(Step::Take),
    ]
}

pub(crate) struct Thread<'w> {
    world: &'w World,
    index: usize,
    /// Buffers that all threads use at once.
    common: &'w [Modelled],
    pub(crate) own: Vec<Modelled>,
    pub(crate) shared: Vec<Shared>,
    stream: StreamRef,
    /// Whether work may be queued on the stream.
    is_pending: bool,
}

impl<'w> Thread<'w> {
    pub(crate) fn new(world: &'w World, index: usize, common: &'w [Modelled], stream: StreamRef) -> Self {
        Self { world, index, common, own: Vec::new(), shared: Vec::new(), stream, is_pending: false }
    }

    /// Whether this thread writes and reads that page of any memory.
    fn is_mine(&self, page: usize) -> bool {
        page % self.world.threads == self.index
    }

    fn pick(&self, which: usize) -> Option<&Modelled> {
        let count = self.own.len() + self.common.len();
        let which = which.checked_rem(count)?;
        self.own.get(which).or_else(|| self.common.get(which - self.own.len()))
    }

    fn take(&mut self, which: usize) -> Option<Modelled> {
        let which = which.checked_rem(self.own.len())?;
        Some(self.own.swap_remove(which))
    }

    /// Waits for what was queued, so that what it wrote is there.
    fn settle(&mut self) {
        if std::mem::take(&mut self.is_pending) {
            wait_for(&self.world.direct, &self.stream);
        }
    }

    /// Looks at all that this thread can see but its bytes while work may be queued that writes them.
    pub(crate) fn check(&self) {
        for modelled in self.own.iter().chain(self.common) {
            modelled.check(self.world, |page| !self.is_pending && self.is_mine(page));
        }
    }

    /// Waits for all work of this thread's, and looks at all that it can see.
    pub(crate) fn check_all(&mut self) {
        self.settle();
        self.check();
    }

    /// A few bytes of a buffer that are this thread's to write; of several pages only where it has no other beside it.
    fn range_in(&self, size: usize, (offset, bytes): (usize, usize)) -> (usize, usize) {
        if self.world.threads == 1 {
            let offset = offset % (size + 1);
            // As often as not over one of the ends that chunks can have.
            let offset = if bytes.is_multiple_of(2) { (offset / G * G).saturating_sub(bytes % 97) } else { offset };
            return (offset, bytes % ((size - offset).min(3 * PAGE) + 1));
        }
        // Chunks are multiples of so many pages that a page's number in its memory and in a buffer are alike.
        let Some(page) = (offset % (size / PAGE + 1)).checked_sub(1) else { return (0, 0) };
        let page = page / self.world.threads * self.world.threads + self.index;
        let within = bytes % PAGE;
        if (page + 1) * PAGE > size { (0, 0) } else { (page * PAGE + within, bytes / PAGE % (PAGE - within) + 1) }
    }

    pub(crate) fn run(&mut self, step: Step) {
        match step {
            Step::Allocate { units, zeroed } => {
                // Not a multiple: rounding up is the resource's.
                let size = (units * G).saturating_sub(units);
                let resource = &self.world.resource;
                let made = if zeroed { resource.allocate_zeroed(size) } else { resource.allocate(size) };
                self.allocated(made, units * G, 0, zeroed);
            }
            Step::Reserve { units, capacity, zeroed } => {
                let (size, capacity, resource) = (units * G, (capacity + 1) * G, &self.world.resource);
                let made = if zeroed {
                    resource.allocate_zeroed_with_capacity(size, capacity)
                } else {
                    resource.allocate_with_capacity(size, capacity)
                };
                self.allocated(made, size, capacity, zeroed);
            }
            Step::Grow { which, units, how } => self.grow(which, units, how),
            Step::Truncate { which, size, into } => self.truncate(which, size, into),
            Step::Close(which) => {
                let Some(Modelled { buffer, .. }) = self.take(which) else { return };
                if let Err(error) = buffer.close() {
                    let (error, buffer) = error.into_parts();
                    assert!(buffer.is_none(), "no wait fails");
                    self.world.require_excused(&error.into());
                }
            }
            Step::CloseWithin { which, is_long } => self.close_within(which, is_long),
            Step::CloseDeferred(which) => {
                let Some(Modelled { buffer, .. }) = self.take(which) else { return };
                Seen::add(&self.world.seen.deferred);
                buffer.close_deferred();
            }
            Step::Drop(which) => drop(self.take(which)),
            Step::Fill { which, range, value } => self.write(which, range, |bytes| vec![value; bytes], true),
            Step::Write { which, range, seed } => {
                let source = |bytes| (0..bytes).map(|at: usize| seed.wrapping_add((at % 251) as u8)).collect();
                self.write(which, range, source, false);
            }
            Step::Queue { which, range, value } => self.queue(which, range, value),
            Step::SetRelease(which) => {
                let Some(which) = which.checked_rem(self.own.len()) else { return };
                self.own[which].buffer.set_release(Release::Stream(self.stream.clone())).unwrap();
            }
            Step::Export(which) => self.export(which),
            Step::Import(which) => self.import(which),
            Step::Give(which) => {
                let given = self.take(which);
                self.world.pot.lock().unwrap().extend(given);
            }
            Step::Take => {
                let taken = self.world.pot.lock().unwrap().pop();
                self.own.extend(taken);
            }
        }
    }

    fn close_within(&mut self, which: usize, is_long: bool) {
        let Some(Modelled { buffer, size, places }) = self.take(which) else { return };
        let time = if is_long { PATIENCE } else { Duration::ZERO };
        let Err(error) = buffer.close_within(Instant::now() + time) else { return };
        let (error, buffer) = error.into_parts();
        match (error, buffer) {
            (Error::DeadlinePassed, Some(buffer)) if !is_long => self.own.push(Modelled { buffer, size, places }),
            (error, buffer) => {
                self.world.require_excused(&error.into());
                self.own.extend(buffer.map(|buffer| Modelled { buffer, size, places }));
            }
        }
    }

    fn fresh(&self, zeroed: bool) -> Option<u8> {
        if zeroed { Some(0) } else { self.world.fresh }
    }

    fn allocated(&mut self, made: Result<VirtualMemoryBuffer, Error>, size: usize, capacity: usize, zeroed: bool) {
        let Some(buffer) = self.world.excuse(made) else { return };
        assert_eq!((buffer.size(), buffer.outcome()), (size, None));
        assert!(buffer.capacity() >= size && (buffer.capacity() >= capacity || self.world.is_failing));
        self.own.push(Modelled::allocated(buffer, self.fresh(zeroed)));
    }

    fn grow(&mut self, which: usize, units: usize, how: How) {
        let mut options = GrowOptions::new();
        options = if how.in_place { options.in_place() } else { options };
        options = if how.zeroed { options.zeroed() } else { options };
        options = if how.by_other { options.chunk_of(&self.world.other) } else { options };
        let fresh = self.fresh(how.zeroed);
        if how.into {
            let Some(from) = self.take(which) else { return };
            let wanted = (from.size + units * G).saturating_sub(units);
            let (size, places, id) = (from.size_when_grown(wanted, G), from.places, from.buffer.id());
            let grown = match from.buffer.grow_into_with(wanted, &options) {
                Ok(buffer) => buffer,
                Err(error) => {
                    let (error, buffer, is_resized) = kept(error);
                    self.require_grow_refused(error, how);
                    if !is_resized {
                        return self.own.push(Modelled { buffer, size: from.size, places });
                    }
                    buffer
                }
            };
            assert_eq!(grown.id(), id);
            self.world.seen.grown(&grown);
            self.own.push(Modelled::grown(&places, size, grown, fresh));
        } else {
            let Some(from) = self.pick(which) else { return };
            let wanted = (from.size + units * G).saturating_sub(units);
            let before = from.buffer.address();
            let grown = match from.buffer.grow_with(wanted, &options) {
                Ok(buffer) => buffer,
                Err(error) => return self.require_grow_refused(error, how),
            };
            assert_eq!((from.buffer.address(), grown.id()), (before, from.buffer.id()));
            assert!(grown.generation() > from.buffer.generation());
            let moved = grown.outcome() == Some(cuvmm::Outcome::Moved);
            assert_eq!(grown.address() != before, moved, "from {before} to {grown:?}");
            self.world.seen.grown(&grown);
            let grown = Modelled::grown(&from.places, from.size_when_grown(wanted, G), grown, fresh);
            self.own.push(grown);
        }
    }

    fn require_grow_refused(&self, error: Error, how: How) {
        match error {
            Error::WouldMove { .. } if how.in_place => {}
            error => self.world.require_excused(&error.into()),
        }
    }

    fn truncate(&mut self, which: usize, size: usize, into: bool) {
        if into {
            let Some(from) = self.take(which) else { return };
            let wanted = size % (from.size + 2);
            let size = wanted.next_multiple_of(G).min(from.size);
            let head = from.head(size);
            let address = from.buffer.address();
            let shorter = match from.buffer.truncate_into(wanted) {
                Ok(buffer) => buffer,
                Err(error) => {
                    let (error, buffer, is_resized) = kept(error);
                    self.world.require_excused(&error.into());
                    if !is_resized {
                        return self.own.push(Modelled { buffer, size: from.size, places: from.places });
                    }
                    buffer
                }
            };
            assert_eq!(shorter.address(), address);
            Seen::add(&self.world.seen.shrunk);
            self.own.push(Modelled { buffer: shorter, size, places: head });
        } else {
            let Some(from) = self.pick(which) else { return };
            let wanted = size % (from.size + 2);
            let size = wanted.next_multiple_of(G).min(from.size);
            let buffer = from.buffer.truncate(wanted).unwrap();
            assert_eq!(buffer.address(), from.buffer.address());
            let shorter = Modelled { buffer, size, places: from.head(size) };
            Seen::add(&self.world.seen.shrunk);
            self.own.push(shorter);
        }
    }

    fn write(&mut self, which: usize, range: (usize, usize), source: impl Fn(usize) -> Vec<u8>, is_fill: bool) {
        self.settle();
        let Some(modelled) = self.pick(which) else { return };
        let (offset, bytes) = self.range_in(modelled.size, range);
        let (source, buffer) = (source(bytes), &modelled.buffer);
        let written = match source.first() {
            Some(value) if is_fill => buffer.fill(offset, bytes, *value),
            _ => buffer.copy_from_host(offset, &source),
        };
        if self.world.excuse(written).is_none() {
            return modelled.forget(offset, bytes);
        }
        modelled.write(offset, &source);
        let mut read = vec![0; bytes];
        if self.world.excuse(buffer.copy_to_host(offset, &mut read)).is_some() {
            assert!(read == source, "{bytes} bytes at {offset:#x} of {buffer:?}");
        }
    }

    fn queue(&mut self, which: usize, range: (usize, usize), value: u8) {
        let Some(modelled) = self.pick(which) else { return };
        let (offset, bytes) = self.range_in(modelled.size, range);
        if bytes == 0 {
            return;
        }
        if value.is_multiple_of(2) {
            hold_up(&self.world.direct, &self.stream, 2000);
        }
        // Drivers refuse to set memory of the host across two mappings in one call.
        let base = modelled.buffer.address();
        let (start, end) = (base.0 + offset as u64, base.0 + (offset + bytes) as u64);
        for chunk in modelled.buffer.chunks() {
            let from = start.max(chunk.address.0);
            if let Some(bytes) =
                end.min(chunk.address.0 + chunk.size as u64).checked_sub(from).filter(|bytes| *bytes > 0)
            {
                queue_fill_at(&self.world.direct, &self.stream, CUdeviceptr(from), bytes as usize, value);
            }
        }
        modelled.write(offset, &vec![value; bytes]);
        Seen::add(&self.world.seen.queued);
        let fenced = self.world.excuse(modelled.buffer.fence(&self.stream)).is_some();
        self.is_pending = true;
        if !fenced {
            // Nobody else waits for it.
            self.settle();
        }
    }

    fn export(&mut self, which: usize) {
        let Some(modelled) = self.pick(which) else { return };
        let is_imported = modelled.head(modelled.size).iter().any(|place| place.handle.is_imported);
        match export(&modelled.buffer) {
            Err(cuvmm::ipc::Error::Imported { .. }) => assert!(is_imported),
            exported => {
                assert!(!is_imported, "{exported:?}");
                let Some(descriptor) = self.world.excuse(exported) else { return };
                let shared = Shared::new(modelled, descriptor);
                // Each holds open files.
                self.shared.truncate(2);
                self.shared.push(shared);
            }
        }
    }

    fn import(&mut self, which: usize) {
        let Some(which) = which.checked_rem(self.shared.len()) else { return };
        let shared = &self.shared[which];
        let imported = import_from(&self.world.resource, &shared.descriptor);
        let Some(buffer) = self.world.excuse(imported) else { return };
        Seen::add(&self.world.seen.imported);
        self.own.push(Modelled::imported(buffer, shared));
    }
}
