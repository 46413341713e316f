//! Buffers against a model: whatever is done to them, in whatever order, they hold the bytes that they should, at the
//! addresses that they should, and nothing is alive that the model does not know of.
//!
//! `PROPTEST_CASES` says how many sequences are tried.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test stops at what it did not expect")]

mod support;

use std::collections::{BTreeMap, BTreeSet};

use cuvmm_driver::CUresult;
use cuvmm_resource::{Outcome, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::{Hints, Machine, Preset};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use support::{Bench, G, R};

#[derive(Clone, Debug)]
enum Step {
    Allocate { units: usize },
    Reserve { units: usize, capacity: usize },
    Grow { which: usize, units: usize },
    GrowInto { which: usize, units: usize },
    Close(usize),
    Drop(usize),
    Fill { which: usize, range: (usize, usize), value: u8 },
    Write { which: usize, range: (usize, usize), seed: u8 },
}

fn step() -> impl Strategy<Value = Step> {
    let which = any::<usize>;
    // As a rule within what a buffer's addresses are reserved in, and now and then beyond.
    let units = || prop_oneof![4 => 0..40_usize, 1 => 440..600_usize];
    let range = || (any::<usize>(), any::<usize>());
    prop_oneof![
        2 => units().prop_map(|units| Step::Allocate { units }),
        2 => (units(), 0..1200_usize).prop_map(|(units, capacity)| Step::Reserve { units, capacity }),
        4 => (which(), units()).prop_map(|(which, units)| Step::Grow { which, units }),
        3 => (which(), units()).prop_map(|(which, units)| Step::GrowInto { which, units }),
        2 => which().prop_map(Step::Close),
        1 => which().prop_map(Step::Drop),
        2 => (which(), range(), any::<u8>()).prop_map(|(which, range, value)| Step::Fill { which, range, value }),
        3 => (which(), range(), any::<u8>()).prop_map(|(which, range, seed)| Step::Write { which, range, seed }),
    ]
}

/// A piece of memory, by number, and a place where one is mapped.
type Memory = usize;
type Place = usize;

/// What every byte of fresh memory reads as.
const POISON: u8 = 0xA5;
/// By how much memory is remembered: most of it is never written.
const PAGE: usize = 4096;

/// The bytes of a piece of memory: those pages of it that were written.
struct Bytes {
    size: usize,
    pages: BTreeMap<usize, Vec<u8>>,
}

impl Bytes {
    fn write(&mut self, offset: usize, source: &[u8]) {
        let mut at = offset;
        let mut rest = source;
        while !rest.is_empty() {
            let page = self.pages.entry(at / PAGE).or_insert_with(|| vec![POISON; PAGE]);
            let (head, tail) = rest.split_at(rest.len().min(PAGE - at % PAGE));
            page[at % PAGE..][..head.len()].copy_from_slice(head);
            (at, rest) = (at + head.len(), tail);
        }
    }
}

/// A buffer, and what it should be: where each of its chunks is mapped, and how long each is.
struct Modelled {
    buffer: VirtualMemoryBuffer,
    size: usize,
    places: Vec<Place>,
}

#[derive(Default)]
struct Model {
    buffers: Vec<Modelled>,
    /// What each memory holds.
    bytes: Vec<Bytes>,
    /// Which memory is mapped at each place.
    mapped: Vec<Memory>,
}

impl Model {
    /// New memory at a new place.
    fn chunk(&mut self, bytes: usize) -> Place {
        self.bytes.push(Bytes { size: bytes, pages: BTreeMap::new() });
        self.place(self.bytes.len() - 1)
    }

    fn place(&mut self, memory: Memory) -> Place {
        self.mapped.push(memory);
        self.mapped.len() - 1
    }

    fn end(&self, places: &[Place]) -> usize {
        places.iter().map(|place| self.bytes[self.mapped[*place]].size).sum()
    }

    fn add(&mut self, buffer: VirtualMemoryBuffer) {
        let size = buffer.size();
        let places = if size == 0 { vec![] } else { vec![self.chunk(size)] };
        self.buffers.push(Modelled { buffer, size, places });
    }

    /// What a grown buffer should be, given the one it was grown from.
    fn grown(&mut self, from: &Modelled, wanted: usize, buffer: VirtualMemoryBuffer) -> Modelled {
        let end = self.end(&from.places);
        let size = wanted.next_multiple_of(G).max(from.size);
        let outcome = buffer.outcome().unwrap();
        assert_eq!(outcome == Outcome::Covered, size <= end, "covered exactly when it can be");
        let mut places = from.places.clone();
        match outcome {
            Outcome::Covered => assert_eq!(buffer.address(), from.buffer.address()),
            Outcome::InPlace => assert_eq!(buffer.address(), from.buffer.address()),
            Outcome::Moved => {
                assert_ne!(buffer.address(), from.buffer.address());
                let memories: Vec<_> = places.iter().map(|place| self.mapped[*place]).collect();
                places = memories.into_iter().map(|memory| self.place(memory)).collect();
            }
            other => panic!("{other:?}"),
        }
        // What was added is what lies behind: one chunk, or two where a reservation ends in between.
        let mut at = 0;
        for chunk in buffer.chunks().iter().filter(|_| size > end) {
            if at >= end {
                places.push(self.chunk(chunk.size));
            }
            at += chunk.size;
        }
        assert!(buffer.chunks().len() <= from.places.len() + 2);
        Modelled { buffer, size, places }
    }

    fn write(&mut self, which: usize, offset: usize, source: &[u8]) {
        let mut at = 0;
        for place in &self.buffers[which].places {
            let bytes = &mut self.bytes[self.mapped[*place]];
            let (from, until) = (at.max(offset), (at + bytes.size).min(offset + source.len()));
            if from < until {
                bytes.write(from - at, &source[from - offset..until - offset]);
            }
            at += bytes.size;
        }
    }

    /// Every page that was written, and the ends of every chunk, where they lie within the buffer.
    fn check_bytes(&self, bench: &Bench, modelled: &Modelled) {
        let start = modelled.buffer.address();
        let mut at = 0;
        for place in &modelled.places {
            let bytes = &self.bytes[self.mapped[*place]];
            let fresh = vec![POISON; PAGE];
            let ends = [0, bytes.size / PAGE - 1];
            for page in ends.iter().chain(bytes.pages.keys()).filter(|page| at + **page * PAGE < modelled.size) {
                let seen = bench.simulator.peek(start.checked_add(at + page * PAGE).unwrap(), PAGE).unwrap();
                let expect = bytes.pages.get(page).unwrap_or(&fresh);
                assert!(seen == *expect, "page {page} of {place} at {at} in {:?}", modelled.buffer);
            }
            at += bytes.size;
        }
    }

    fn check(&self, bench: &Bench) {
        let mut places: BTreeSet<Place> = BTreeSet::new();
        let mut reservations = BTreeSet::new();
        for modelled in &self.buffers {
            let buffer = &modelled.buffer;
            assert_eq!((buffer.size(), buffer.is_empty()), (modelled.size, modelled.size == 0));
            assert!(buffer.capacity() >= self.end(&modelled.places) && buffer.capacity() >= buffer.size());
            let mut at = buffer.address().0;
            for chunk in buffer.chunks() {
                assert_eq!(chunk.address.0, at, "no gap");
                at += chunk.size as u64;
            }
            assert!(at >= buffer.address().0 + buffer.size() as u64);
            self.check_bytes(bench, modelled);
            places.extend(&modelled.places);
            for mapping in buffer.mappings() {
                reservations.insert(mapping.room().reservation().address());
            }
        }
        let memories: BTreeSet<Memory> = places.iter().map(|place| self.mapped[*place]).collect();
        let bytes: usize = memories.iter().map(|memory| self.bytes[*memory].size).sum();
        let live = bench.simulator.live();
        assert_eq!((live.mappings, live.allocations), (places.len(), memories.len()));
        assert_eq!(live.device_bytes, BTreeMap::from_iter((bytes > 0).then_some((0, bytes))));
        // Besides, an empty buffer with capacity holds addresses, which it shows to nobody.
        assert!(live.reservations >= reservations.len());
        assert_eq!(bench.simulator.violations(), []);
    }

    fn run(&mut self, resource: &VirtualMemoryResource, step: Step) {
        let count = self.buffers.len();
        let pick = |which: usize| (count > 0).then(|| which % count);
        match step {
            Step::Allocate { units } => {
                // Not a multiple: rounding up is the resource's.
                let buffer = resource.allocate((units * G).saturating_sub(units)).unwrap();
                assert_eq!((buffer.size(), buffer.outcome()), (units * G, None));
                self.add(buffer);
            }
            Step::Reserve { units, capacity } => {
                let buffer = resource.allocate_with_capacity(units * G, (capacity + 1) * G).unwrap();
                assert_eq!(buffer.size(), units * G);
                assert!(buffer.capacity() >= (capacity + 1).max(units) * G && buffer.capacity().is_multiple_of(R));
                self.add(buffer);
            }
            Step::Grow { which, units } => {
                let Some(which) = pick(which) else { return };
                let from = &self.buffers[which];
                let (before, wanted) = (from.buffer.address(), from.size + units * G - units);
                let buffer = from.buffer.grow(wanted).unwrap();
                assert_eq!((buffer.id(), from.buffer.address()), (from.buffer.id(), before));
                assert!(buffer.generation() > from.buffer.generation());
                let from = self.buffers.swap_remove(which);
                let grown = self.grown(&from, wanted, buffer);
                self.buffers.extend([from, grown]);
            }
            Step::GrowInto { which, units } => {
                let Some(which) = pick(which) else { return };
                let from = self.buffers.swap_remove(which);
                let (wanted, empty) = (from.size + units * G, from.buffer.address().0 == 0);
                // A share keeps the old addresses in being, so that a new one can be told from them.
                let old = from.buffer.grow(0).unwrap();
                assert_eq!((old.outcome(), old.size()), (Some(Outcome::Covered), from.size));
                let buffer = from.buffer.grow_into(wanted).unwrap();
                assert!(empty || buffer.id() == old.id());
                let from = Modelled { buffer: old, size: from.size, places: from.places };
                let grown = self.grown(&from, wanted, buffer);
                self.buffers.push(grown);
                from.buffer.close().unwrap();
            }
            Step::Close(which) => {
                if let Some(which) = pick(which) {
                    self.buffers.swap_remove(which).buffer.close().unwrap();
                }
            }
            Step::Drop(which) => {
                if let Some(which) = pick(which) {
                    drop(self.buffers.swap_remove(which));
                }
            }
            Step::Fill { which, range, value } => {
                let Some(which) = pick(which) else { return };
                let (offset, bytes) = within(self.buffers[which].size, range);
                self.buffers[which].buffer.fill(offset, bytes, value).unwrap();
                self.write(which, offset, &vec![value; bytes]);
            }
            Step::Write { which, range, seed } => {
                let Some(which) = pick(which) else { return };
                let (offset, bytes) = within(self.buffers[which].size, range);
                let source: Vec<u8> = (0..bytes).map(|at| seed.wrapping_add((at % 251) as u8)).collect();
                let buffer = &self.buffers[which].buffer;
                buffer.copy_from_host(offset, &source).unwrap();
                let mut read = vec![0; bytes];
                buffer.copy_to_host(offset, &mut read).unwrap();
                assert!(read == source);
                self.write(which, offset, &source);
            }
        }
    }
}

/// A few pages at most of `size` bytes, possibly none, which may span chunks.
fn within(size: usize, (offset, bytes): (usize, usize)) -> (usize, usize) {
    let offset = offset % (size + 1);
    // As often as not over one of the ends that chunks can have.
    let offset = if bytes.is_multiple_of(2) { (offset / G * G).saturating_sub(bytes % 97) } else { offset };
    (offset, bytes % ((size - offset).min(3 * PAGE) + 1))
}

fn check(preset: Preset, hints: Hints) {
    // PROPTEST_CASES, where it is set, is in the default.
    let cases = std::env::var_os("PROPTEST_CASES").map_or(128, |_| Config::default().cases);
    let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let steps = prop::collection::vec(step(), 1..40);
    let outcome = runner.run(&steps, |steps| {
        let bench = Bench::new(Machine::small().device_memory(64 << 30).preset(preset).hints(hints));
        let resource = bench.plain();
        let mut model = Model::default();
        for step in steps {
            model.run(&resource, step);
            model.check(&bench);
        }
        drop(resource);
        for modelled in model.buffers {
            modelled.buffer.close().unwrap();
        }
        bench.assert_clean();
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
}

#[test]
fn where_hints_are_granted() {
    check(Preset::Strict, Hints::Granted);
    check(Preset::Measured, Hints::Granted);
}

#[test]
fn where_hints_lead_elsewhere() {
    check(Preset::Strict, Hints::Elsewhere);
    check(Preset::Measured, Hints::Elsewhere);
}

#[test]
fn where_hints_are_refused() {
    check(Preset::Strict, Hints::Refused(CUresult::INVALID_VALUE));
    check(Preset::Measured, Hints::Refused(CUresult::OUT_OF_MEMORY));
}
