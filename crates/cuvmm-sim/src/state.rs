//! What a simulated driver knows, and the questions that its rules ask of two ordered maps.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::thread::ThreadId;

use cuvmm_driver::sys::*;
use cuvmm_driver::{CUresult, Call};

use crate::capture::Capture;
use crate::context::{Context, Primary};
use crate::create::properties_by;
use crate::event::Event;
use crate::faults::push_last;
use crate::graph::{Executable, Graph};
use crate::latency::{Aftermath, Latency};
use crate::live::Violation;
use crate::memory::{self, FileIdentity, Memory, MemoryFile};
use crate::module::Module;
use crate::placer::Placer;
use crate::policy::Policy;
use crate::session::Answer;
use crate::space::Range;
use crate::stream::{Pending, Stream};
use crate::thread::Thread;
use crate::user_object::UserObject;

/// How many numbers of what ended with a context are kept.
const REMEMBERED: usize = 1024;

/// Everything behind the lock.
pub(crate) struct State {
    pub(crate) policy: Policy,
    pub(crate) reservations: BTreeMap<u64, Reservation>,
    /// Behind the reservations, so that its arena is given back after they are.
    pub(crate) placer: Placer,
    pub(crate) mappings: BTreeMap<u64, Mapping>,
    pub(crate) handles: HashMap<u64, Handle>,
    pub(crate) gone: Gone,
    pub(crate) physical: BTreeMap<u64, Physical>,
    /// The memory that is a file here, by that.
    pub(crate) by_file: HashMap<FileIdentity, u64>,
    pub(crate) held: Vec<Held>,
    pinned: Vec<Pinned>,
    /// The descriptors that callers were given, where their number is limited.
    pub(crate) given_away: Vec<(RawFd, FileIdentity)>,
    pub(crate) used: BTreeMap<Home, usize>,
    pub(crate) reserved_bytes: u64,
    pub(crate) primaries: BTreeMap<i32, Primary>,
    pub(crate) contexts: BTreeMap<u64, Context>,
    pub(crate) threads: HashMap<ThreadId, Thread>,
    pub(crate) streams: BTreeMap<u64, Stream>,
    pub(crate) events: HashMap<u64, Event>,
    pub(crate) pending: BTreeMap<u64, Pending>,
    pub(crate) captures: BTreeMap<u64, Capture>,
    pub(crate) graphs: BTreeMap<u64, Graph>,
    /// What calls leave to later ones, where their time is modelled.
    pub(crate) aftermath: Option<Aftermath>,
    pub(crate) executables: BTreeMap<u64, Executable>,
    pub(crate) user_objects: BTreeMap<u64, UserObject>,
    /// How many of them were alive when somebody looked last.
    pub(crate) objects_alive: usize,
    pub(crate) modules: BTreeMap<u64, Module>,
    pub(crate) violations: VecDeque<Violation>,
    pub(crate) calls: VecDeque<Call>,
    pub(crate) ended: Ended,
    pub(crate) shut_down: bool,
    pub(crate) stopped: bool,
    next: u64,
}

/// A range of addresses that somebody reserved.
pub(crate) struct Reservation {
    pub(crate) bytes: u64,
    /// Made by cuMemAlloc, and none of the virtual memory calls' business.
    pub(crate) plain: bool,
    pub(crate) range: Range,
}

/// Memory at an address.
pub(crate) struct Mapping {
    pub(crate) bytes: u64,
    /// The value that it was mapped with; none for cuMemAlloc's.
    pub(crate) handle: Option<u64>,
    pub(crate) memory_id: u64,
    pub(crate) memory: Arc<Memory>,
    pub(crate) access: BTreeMap<Grantee, CUmemAccess_flags>,
    pub(crate) buffer_id: u64,
    /// What there is to say of memory that cuMemAlloc made.
    pub(crate) plain: Option<Plain>,
}

impl Mapping {
    pub(crate) fn is_host_memory(&self) -> bool {
        let location = self.memory.properties.location.location_type;
        matches!(location, CUmemLocationType::HOST | CUmemLocationType::HOST_NUMA)
    }

    /// Whether the host may use it.
    pub(crate) fn is_granted_to_host(&self) -> bool {
        self.access.get(&Grantee::Host).is_some_and(|&flags| flags != CUmemAccess_flags::NONE)
    }
}

/// A call of cuMemAlloc.
#[derive(Clone, Copy)]
pub(crate) struct Plain {
    pub(crate) context: u64,
    /// What was asked for, before it was rounded up.
    pub(crate) bytes: u64,
}

/// Who can be granted access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Grantee {
    Device(i32),
    Host,
}

/// A handle's value, and what it stands for.
pub(crate) struct Handle {
    pub(crate) memory_id: u64,
    pub(crate) references: usize,
    pub(crate) mappings: usize,
    pub(crate) imported: bool,
}

/// Physical memory that something here refers to.
pub(crate) struct Physical {
    pub(crate) memory: Arc<Memory>,
    pub(crate) home: Home,
    /// Handles, mappings of cuMemAlloc, and dma-bufs.
    pub(crate) users: usize,
    pub(crate) exported: bool,
}

/// Where memory is, for counting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Home {
    Device(i32),
    Node(i32),
    /// Made by another process, and counted there.
    Foreign,
}

/// Memory of ours that nothing here refers to, held by descriptors or by other processes.
pub(crate) struct Held {
    pub(crate) file: Arc<MemoryFile>,
    pub(crate) home: Home,
    pub(crate) bytes: usize,
}

/// Memory that a dma-buf holds.
struct Pinned {
    dma_buf: MemoryFile,
    memories: Vec<u64>,
}

/// The numbers of contexts, and of streams and events that went with theirs: the last ones, so that the list stays
/// short however long a simulation lasts.
#[derive(Default)]
pub(crate) struct Ended(VecDeque<u64>);

impl Ended {
    pub(crate) fn add(&mut self, number: u64) {
        if self.0.len() == REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back(number);
    }

    pub(crate) fn contains(&self, number: &u64) -> bool {
        self.0.contains(number)
    }
}

/// What the last handles said of which nothing is left: a measured driver goes on telling it.
#[derive(Default)]
pub(crate) struct Gone(VecDeque<(u64, CUmemAllocationProp)>);

impl Gone {
    fn add(&mut self, handle: u64, properties: CUmemAllocationProp) {
        if self.0.len() == REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back((handle, properties));
    }

    pub(crate) fn properties(&self, handle: u64) -> Option<CUmemAllocationProp> {
        self.0.iter().find(|(gone, _)| *gone == handle).map(|&(_, properties)| properties)
    }
}

/// A piece of memory that an address range leads to.
pub(crate) struct Segment {
    pub(crate) memory: Arc<Memory>,
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

impl State {
    pub(crate) fn new(policy: Policy, latency: Option<Latency>) -> Self {
        Self {
            policy,
            reservations: BTreeMap::new(),
            placer: Placer::new(),
            mappings: BTreeMap::new(),
            handles: HashMap::new(),
            gone: Gone::default(),
            physical: BTreeMap::new(),
            by_file: HashMap::new(),
            held: Vec::new(),
            pinned: Vec::new(),
            given_away: Vec::new(),
            used: BTreeMap::new(),
            reserved_bytes: 0,
            primaries: BTreeMap::new(),
            contexts: BTreeMap::new(),
            threads: HashMap::new(),
            streams: BTreeMap::new(),
            events: HashMap::new(),
            pending: BTreeMap::new(),
            captures: BTreeMap::new(),
            graphs: BTreeMap::new(),
            executables: BTreeMap::new(),
            aftermath: latency.map(Aftermath::new),
            user_objects: BTreeMap::new(),
            objects_alive: 0,
            modules: BTreeMap::new(),
            violations: VecDeque::new(),
            calls: VecDeque::new(),
            ended: Ended::default(),
            shut_down: false,
            stopped: false,
            next: 0x5_0000,
        }
    }

    /// A number that nothing has had before; also what handles and opaque values are made of.
    pub(crate) fn number(&mut self) -> u64 {
        self.next += 0x10;
        self.next
    }

    pub(crate) fn log(&mut self, call: Call) {
        push_last(&mut self.calls, call);
    }

    pub(crate) fn note(&mut self, call: Call, text: String) {
        push_last(&mut self.violations, Violation { call, text });
    }

    /// The reservation around an address.
    pub(crate) fn reservation_at(&self, address: u64) -> Option<(u64, &Reservation)> {
        let (&start, reservation) = self.reservations.range(..=address).next_back()?;
        (address - start < reservation.bytes).then_some((start, reservation))
    }

    /// The reservation around an address that the virtual memory calls may use.
    pub(crate) fn virtual_reservation_at(&self, address: u64) -> Option<(u64, &Reservation)> {
        self.reservation_at(address).filter(|(_, reservation)| !reservation.plain)
    }

    /// Takes addresses that are nobody's.
    pub(crate) fn place(&mut self, bytes: u64, alignment: u64) -> Answer<Range> {
        let range = self.placer.place(&self.reservations, bytes, alignment);
        range.map_err(|_| CUresult::OUT_OF_MEMORY)
    }

    /// The mapping around an address.
    pub(crate) fn mapping_at(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (&start, mapping) = self.mappings.range(..=address).next_back()?;
        (address - start < mapping.bytes).then_some((start, mapping))
    }

    /// The mapping around an address, if a virtual memory call made it.
    pub(crate) fn virtual_mapping_at(&self, address: u64) -> Option<(u64, &Mapping)> {
        self.mapping_at(address).filter(|(_, mapping)| mapping.handle.is_some())
    }

    /// The mappings that share an address with `start..end`, in order.
    pub(crate) fn mappings_over(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, &Mapping)> {
        let before = self.mapping_at(start).map_or(start, |(from, _)| from);
        self.mappings.range(before..end.max(before)).map(|(&from, mapping)| (from, mapping))
    }

    /// The whole virtual mappings that make up `start..end`: none if there is part of one, or of other memory.
    pub(crate) fn whole_mappings(&self, start: u64, end: u64) -> Option<Vec<u64>> {
        self.mappings_over(start, end)
            .map(|(from, mapping)| {
                let whole = from >= start && from + mapping.bytes <= end && mapping.handle.is_some();
                whole.then_some(from)
            })
            .collect()
    }

    /// Whether `start..end` lies in several mappings, one of which the host was granted.
    pub(crate) fn is_cut_for_host(&self, start: u64, end: u64) -> bool {
        let mappings = || self.mappings_over(start, end);
        mappings().nth(1).is_some() && mappings().any(|(_, mapping)| mapping.is_granted_to_host())
    }

    /// Whether `start..end` lies in mappings of host memory of which the host was granted one and not another.
    pub(crate) fn is_partly_granted_to_host(&self, start: u64, end: u64) -> bool {
        let of_host = self.mappings_over(start, end).filter(|(_, mapping)| mapping.is_host_memory());
        let mut granted = of_host.map(|(_, mapping)| mapping.is_granted_to_host());
        granted.next().is_some_and(|first| granted.any(|other| other != first))
    }

    /// Whether these mappings leave no hole in `start..end`.
    pub(crate) fn without_hole(&self, starts: &[u64], start: u64, end: u64) -> bool {
        let mut at = start;
        for from in starts {
            match self.mappings.get(from) {
                Some(mapping) if *from == at => at += mapping.bytes,
                _ => return false,
            }
        }
        at == end
    }

    /// Whether `start..end` lies in one virtual reservation.
    pub(crate) fn in_one_reservation(&self, start: u64, end: u64) -> bool {
        self.virtual_reservation_at(start).is_some_and(|(from, reservation)| end <= from + reservation.bytes)
    }

    /// The memory behind an address range, if `device` may use all of it so.
    pub(crate) fn segments(&self, address: u64, bytes: usize, device: i32, write: bool) -> Option<Vec<Segment>> {
        let end = address.checked_add(bytes as u64)?;
        let mut at = address;
        let mut segments = Vec::new();
        while at < end {
            let segment = self.segment(at, end - at, device, write)?;
            at += segment.bytes as u64;
            segments.push(segment);
        }
        Some(segments)
    }

    /// The memory behind an address, as far as one mapping goes and at most so much, if `device` may use it so.
    pub(crate) fn segment(&self, address: u64, bytes: u64, device: i32, write: bool) -> Option<Segment> {
        let needed = if write { CUmemAccess_flags::READWRITE } else { CUmemAccess_flags::READ };
        let (start, mapping) = self.mapping_at(address)?;
        let granted = mapping.access.get(&Grantee::Device(device)).copied().unwrap_or_default();
        let offset = address - start;
        let segment = || Segment {
            memory: mapping.memory.clone(),
            offset: offset as usize,
            bytes: bytes.min(mapping.bytes - offset) as usize,
        };
        (granted.0 & needed.0 == needed.0).then(segment)
    }

    /// Counts new physical memory, for as long as it has users.
    pub(crate) fn add_physical(&mut self, memory: Arc<Memory>, home: Home) -> u64 {
        let id = self.number();
        if home != Home::Foreign {
            *self.used.entry(home).or_default() += memory.bytes();
        }
        if let Some(identity) = memory.identity() {
            self.by_file.insert(identity, id);
        }
        self.physical.insert(id, Physical { memory, home, users: 0, exported: false });
        id
    }

    /// Makes a handle with one reference.
    pub(crate) fn add_handle(&mut self, memory_id: u64, imported: bool) -> CUmemGenericAllocationHandle {
        let value = self.number();
        self.handles.insert(value, Handle { memory_id, references: 1, mappings: 0, imported });
        if let Some(physical) = self.physical.get_mut(&memory_id) {
            physical.users += 1;
        }
        CUmemGenericAllocationHandle(value)
    }

    /// Forgets a handle that neither references nor mappings need, and the memory with its last user.
    pub(crate) fn settle_handle(&mut self, value: u64) {
        let Some(handle) = self.handles.get(&value) else { return };
        if handle.references == 0 && handle.mappings == 0 {
            let (memory_id, imported) = (handle.memory_id, handle.imported);
            self.handles.remove(&value);
            if let Some(physical) = self.physical.get(&memory_id) {
                self.gone.add(value, properties_by(&physical.memory, imported));
            }
            self.drop_user(memory_id);
        }
    }

    pub(crate) fn drop_user(&mut self, memory_id: u64) {
        let Some(physical) = self.physical.get_mut(&memory_id) else { return };
        physical.users = physical.users.saturating_sub(1);
        if physical.users > 0 {
            return;
        }
        if let Some(Physical { memory, home, exported, .. }) = self.physical.remove(&memory_id) {
            let bytes = memory.bytes();
            if let Some(identity) = memory.identity() {
                self.by_file.remove(&identity);
            }
            match memory.file() {
                Some(file) if exported && home != Home::Foreign && file.is_held() => {
                    self.held.push(Held { file, home, bytes });
                }
                _ => self.give_back(home, bytes),
            }
        }
    }

    /// How many files are open here for memory that others can have, and by callers that were given descriptors.
    pub(crate) fn open_files(&mut self) -> usize {
        self.is_held();
        self.given_away.retain(|&(number, identity)| memory::is_open(number, identity));
        self.files_given_out()
    }

    /// The same, with those that were closed since somebody looked last.
    pub(crate) fn files_given_out(&self) -> usize {
        let ours = self.physical.values().filter(|physical| physical.memory.file_number().is_some()).count();
        ours + self.held.len() + self.pinned.len() + self.given_away.len()
    }

    fn give_back(&mut self, home: Home, bytes: usize) {
        if let Some(aftermath) = &mut self.aftermath
            && home != Home::Foreign
        {
            aftermath.add(bytes as u64);
        }
        if let Some(used) = self.used.get_mut(&home) {
            *used = used.saturating_sub(bytes);
            if *used == 0 {
                self.used.remove(&home);
            }
        }
    }

    /// Keeps memory for as long as a dma-buf is open.
    pub(crate) fn pin(&mut self, dma_buf: MemoryFile, memories: Vec<u64>) {
        for id in &memories {
            if let Some(physical) = self.physical.get_mut(id) {
                physical.users += 1;
            }
        }
        self.pinned.push(Pinned { dma_buf, memories });
    }

    /// Looks which memory nobody holds any more; whether some is held by others alone.
    pub(crate) fn is_held(&mut self) -> bool {
        let (pinned, closed): (Vec<_>, Vec<_>) = self.pinned.drain(..).partition(|pinned| pinned.dma_buf.is_held());
        self.pinned = pinned;
        for memory in closed.into_iter().flat_map(|pinned| pinned.memories) {
            self.drop_user(memory);
        }
        let (held, free): (Vec<_>, Vec<_>) = self.held.drain(..).partition(|held| held.file.is_held());
        self.held = held;
        for memory in free {
            self.give_back(memory.home, memory.bytes);
        }
        !self.held.is_empty() || !self.pinned.is_empty()
    }

    /// Whether so much more fits where there is so much in all. What others hold is looked at only where that decides.
    pub(crate) fn has_room(&mut self, home: Home, bytes: usize, total: usize) -> bool {
        let fits = |used: usize| used.checked_add(bytes).is_some_and(|used| used <= total);
        fits(self.used.get(&home).copied().unwrap_or(0)) || fits(self.used_by(home))
    }

    /// The bytes that are in use there.
    pub(crate) fn used_by(&mut self, home: Home) -> usize {
        self.is_held();
        self.used.get(&home).copied().unwrap_or(0)
    }

    /// Forgets everything, which unmaps and closes it.
    pub(crate) fn clear(&mut self) {
        *self = Self { stopped: true, ..Self::new(self.policy, None) };
    }
}

/// The end of a range, if it has one.
pub(crate) fn end_of(address: CUdeviceptr, bytes: usize) -> Answer<u64> {
    address.checked_add(bytes).map(|end| end.0).ok_or(CUresult::INVALID_VALUE)
}
