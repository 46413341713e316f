//! [`Scene`]: what an operation works on.

use cuvmm::driver::sys::CUmemAccess_flags;
use cuvmm::handles::Reservation;
use cuvmm::{BufferDescriptor, Error, StreamRef, VirtualMemoryBuffer, VirtualMemoryResource};

use crate::backend::Left;
use crate::foreign::ForeignRange;
use crate::graph::{Graph, await_graphs_but};
use crate::memory::{G, require_marks, write_marks};
use crate::work::Capture;

/// The marks that the buffers of a scene hold.
const SEED: u8 = 7;

/// What an operation works on.
pub struct Scene {
    /// What its buffers are made by.
    pub resource: VirtualMemoryResource,
    /// Another resource of the same kind of memory.
    pub other: Option<VirtualMemoryResource>,
    /// The input.
    pub buffer: Option<VirtualMemoryBuffer>,
    /// Aliases of it, which no failure touches.
    pub aliases: Vec<VirtualMemoryBuffer>,
    /// A range of others, as long as it is theirs.
    pub foreign: Option<ForeignRange>,
    /// What lies behind it.
    pub occupied: Option<Reservation>,
    /// Streams that it may wait for.
    pub streams: Vec<StreamRef>,
    /// Graphs that may own its memory.
    pub graphs: Vec<Graph>,
    /// A capture whose graph may.
    pub capture: Option<Capture>,
    /// A descriptor of it.
    pub descriptor: Option<BufferDescriptor>,
    /// Whether the input became a larger or smaller one, and only what it no longer has was not given back.
    pub is_resized: bool,
    had_foreign: bool,
    was: Option<Shape>,
}

/// What is to stay as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Shape {
    address: u64,
    size: usize,
    capacity: usize,
    chunks: Vec<(u64, usize)>,
    /// What each device may do with each chunk, by the driver's word.
    access: Vec<Vec<CUmemAccess_flags>>,
    reservations: usize,
}

impl Shape {
    fn of(buffer: &VirtualMemoryBuffer) -> Self {
        let mappings = buffer.mappings();
        let mut reserved: Vec<u64> = mappings.iter().map(|mapping| mapping.room().reservation().address().0).collect();
        reserved.dedup();
        Self {
            address: buffer.address().0,
            size: buffer.size(),
            capacity: buffer.capacity(),
            chunks: mappings.iter().map(|mapping| (mapping.address().0, mapping.size())).collect(),
            access: access_of(buffer),
            reservations: reserved.len(),
        }
    }
}

fn access_of(buffer: &VirtualMemoryBuffer) -> Vec<Vec<CUmemAccess_flags>> {
    let driver = buffer.resource().device().driver();
    let mappings = buffer.mappings();
    let granted = mappings.iter().map(|mapping| {
        let devices = driver.devices().into_iter();
        devices.map(|device| driver.mem_get_access(device.location(), mapping.address()).expect("an access")).collect()
    });
    granted.collect()
}

impl Scene {
    /// One without an input.
    pub fn empty(resource: VirtualMemoryResource) -> Self {
        Self {
            resource,
            other: None,
            buffer: None,
            aliases: Vec::new(),
            foreign: None,
            occupied: None,
            streams: Vec::new(),
            graphs: Vec::new(),
            capture: None,
            descriptor: None,
            is_resized: false,
            had_foreign: false,
            was: None,
        }
    }

    /// One with a range of others, which goes with it unless it is taken.
    pub fn beside(resource: VirtualMemoryResource, range: ForeignRange) -> Self {
        Self { foreign: Some(range), had_foreign: true, ..Self::empty(resource) }
    }

    /// One with this input, which holds marks from now on.
    pub fn of(buffer: VirtualMemoryBuffer) -> Self {
        write_marks(&buffer, SEED);
        let (resource, was) = (buffer.resource().clone(), Some(Shape::of(&buffer)));
        Self { buffer: Some(buffer), was, ..Self::empty(resource) }
    }

    /// The input.
    pub fn buffer(&self) -> &VirtualMemoryBuffer {
        self.buffer.as_ref().expect("an input")
    }

    /// Takes the input, to be put back where it is not used up.
    pub fn take(&mut self) -> VirtualMemoryBuffer {
        self.buffer.take().expect("an input")
    }

    /// Whether the input was used up.
    pub(super) fn is_used_up(&self) -> bool {
        self.was.is_some() && self.buffer.is_none() || self.had_foreign && self.foreign.is_none()
    }

    /// The resources that count all that it has. What is asked of a range of others is counted nowhere.
    pub(super) fn counting_resources(&self) -> Vec<VirtualMemoryResource> {
        let resources = self.other.iter().chain([&self.resource]);
        resources.filter(|_| !self.had_foreign).cloned().collect()
    }

    /// What a drop keeps that may let go of nothing.
    pub(super) fn whole(&self) -> Left {
        let was = self.was.as_ref().expect("an input");
        let chunks = was.chunks.len();
        Left { mappings: chunks, allocations: chunks, reservations: was.reservations, ..Left::default() }
    }

    /// Demands that the input is as it was, with its bytes, and that all that has its memory has them; and, where it is
    /// to be used on, that it grows.
    pub(super) fn require_intact(&self, made: Option<&VirtualMemoryBuffer>, is_to_grow: bool, case: &str) {
        let Some(was) = &self.was else {
            let next = self.resource.allocate(G).unwrap_or_else(|error| panic!("{case}: then allocating: {error}"));
            return next.close().expect("a close");
        };
        if let Some(buffer) = &self.buffer {
            assert!(self.is_resized || Shape::of(buffer) == *was, "{case}: {buffer:?} is not as it was: {was:?}");
            require_marks(buffer, SEED, buffer.size().min(was.size));
        }
        // What is imported has the access of whom it was imported by.
        let made = made.filter(|_| self.descriptor.is_none());
        for buffer in self.aliases.iter().chain(made) {
            require_marks(buffer, SEED, buffer.size().min(was.size));
            let shared = buffer.chunks().len().min(was.access.len());
            assert_eq!(access_of(buffer)[..shared], was.access[..shared], "{case}: access");
        }
        if let (Some(buffer), true) = (&self.buffer, is_to_grow) {
            let larger = buffer.grow(buffer.size() + G).unwrap_or_else(|error| panic!("{case}: then it grew: {error}"));
            require_marks(&larger, SEED, buffer.size().min(was.size));
            larger.close().expect("a close");
        }
    }

    /// Destroys its graphs, and waits until none has any of its memory but for so many shares, which are lost.
    pub(super) fn end_graphs(&mut self, lost: usize) {
        if let Some(capture) = self.capture.take() {
            capture.end();
        }
        self.graphs.clear();
        await_graphs_but(&self.resource, lost);
    }

    /// Closes what there is, and what was made of it, past failures. The first is told.
    pub(super) fn close(self, made: Option<VirtualMemoryBuffer>) -> Result<(), Error> {
        let buffers = made.into_iter().chain(self.aliases).chain(self.buffer);
        let closed = buffers.map(|buffer| buffer.close().map_err(Error::from));
        let closed = closed.fold(Ok(()), Result::and);
        if let Some(range) = self.foreign {
            range.take_down();
        }
        closed
    }
}
