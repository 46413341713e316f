//! Peers that do anything. What one does is a program, written in whatever bytes there are: they come from proptest in
//! `tests/hostile.rs`, and from the fuzzer in `fuzz/`.
//!
//! All that it says is in the socket before anyone looks, and who looks waits for nothing: so a program takes one thread
//! and no time.

mod peer;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cuvmm_driver::sys::CUmemAllocationHandleType;
use cuvmm_driver::{Call, Driver, Failure, Hook, Hooked, Invocation};
use cuvmm_ipc::wire::{self, Preamble, Reply};
use cuvmm_ipc::{
    BufferDescriptor, Error, Limits, export, export_as, import, receive, receive_buffer, send, send_buffer,
};
use cuvmm_resource::{HandleKind, Location, Options, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::{Machine, NumaNode, Simulator};
use nix::sys::eventfd::EventFd;
use rustix::fs::{Mode, OFlags};

use self::peer::{HONEST, Peer, Program};
use crate::simulated::{Bench, G, grown};
use crate::support::{memory_file, pair};

const POSIX: CUmemAllocationHandleType = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
const FABRIC: CUmemAllocationHandleType = CUmemAllocationHandleType::FABRIC;
/// Addresses come in multiples of this.
const ADDRESSES: u64 = 2 << 20;
/// What a receiver takes where it takes little.
const LITTLE: Limits = Limits { max_handles: 24, max_bytes: 64 * G };

/// What a file is that is sent as a handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// A handle to memory of the receiver's device.
    Handle,
    /// A handle to memory of a NUMA node.
    OtherMemory,
    /// A file of the same kind as a handle, which is none.
    NoHandle,
    /// A file of another kind.
    OtherFile,
}

/// A receiver and a sender, and all that may be sent to them.
pub(crate) struct Stage {
    simulator: Simulator,
    watch: Arc<Watch>,
    resource: VirtualMemoryResource,
    /// What a sender has.
    buffer: VirtualMemoryBuffer,
    /// The first are handles to memory of the sizes [`HONEST`].
    files: Vec<(What, OwnedFd)>,
    /// Fabric handles to memory of those sizes, and who keeps it.
    fabric: Vec<BufferDescriptor>,
    uuid: [u8; 16],
    host: [u8; 16],
    /// Whose memory is sent.
    _exporter: Bench,
}

/// What the driver was asked.
#[derive(Debug, Default)]
struct Asked {
    calls: Vec<Call>,
    /// The bytes of all reservations and of all mappings.
    reserved: u64,
    mapped: u64,
    /// Descriptors that were given to it, and are no file of the kind that its own are.
    unchecked: Vec<u64>,
}

/// Sees what the driver is asked.
#[derive(Debug, Default)]
struct Watch(Mutex<Asked>);

impl Watch {
    fn asked(&self) -> MutexGuard<'_, Asked> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hook for Watch {
    fn before(&self, invocation: &Invocation<'_>) -> Option<Failure> {
        let mut asked = self.asked();
        let argument = |nth: usize| invocation.arguments[nth];
        match invocation.call {
            Call::cuMemImportFromShareableHandle => {
                let (file, is_file) = (argument(1), argument(2) == u64::from(POSIX.0));
                let kind = std::fs::metadata(format!("/proc/self/fd/{file}")).map(|metadata| metadata.is_file());
                if is_file && (file == 0 || !matches!(kind, Ok(true))) {
                    asked.unchecked.push(file);
                }
            }
            Call::cuMemAddressReserve => asked.reserved += argument(1),
            Call::cuMemMap => asked.mapped += argument(1),
            _ => {}
        }
        asked.calls.push(invocation.call);
        None
    }
}

/// A header that a receiver may take, as far as it was read without the code that is tried.
#[derive(Debug, PartialEq)]
struct Announced {
    chunks: usize,
    size: u64,
    sum: u64,
}

impl Stage {
    pub(crate) fn new() -> Self {
        let machine = || Machine::small().with_imex().numa_nodes([NumaNode { id: 0, memory: 1 << 30 }]);
        let exporter = Bench::new(machine());
        let from = of_both_kinds(&exporter.driver);
        let fabric = |size: &usize| export_as(&from.allocate(*size).unwrap(), HandleKind::Fabric).unwrap();
        let fabric = HONEST.iter().map(fabric).collect();
        let mut files: Vec<_> = HONEST.iter().map(|size| (What::Handle, handle(&from, *size))).collect();
        let node = Options::new().location(Location::HostNuma(0)).handle_kind(HandleKind::PosixFd);
        let node = VirtualMemoryResource::new(from.device(), node).unwrap();
        files.push((What::OtherMemory, handle(&node, G)));
        files.extend(no_handles().map(|file| (What::NoHandle, file)));
        files.extend(other_files().into_iter().map(|file| (What::OtherFile, file)));

        let simulator = Simulator::new(machine());
        let watch = Arc::new(Watch::default());
        let driver = Driver::new(Hooked::new(simulator.clone(), Arc::clone(&watch))).unwrap();
        let resource = of_both_kinds(&driver);
        let buffer = grown(&resource, 40);
        // What a process is asked once is asked by now.
        let descriptor = export(&buffer).unwrap();
        let (uuid, host) = (descriptor.device_uuid().unwrap().bytes, descriptor.host().unwrap().bytes());
        import(&resource, descriptor).unwrap().close().unwrap();
        Self { simulator, watch, resource, buffer, files, fabric, uuid, host, _exporter: exporter }
    }

    /// What can be sent as handles, by number.
    pub(crate) fn files(&self) -> impl Iterator<Item = What> {
        self.files.iter().map(|(what, _)| *what)
    }

    fn peer(&self, socket: UnixStream) -> Peer<'_> {
        let files = self.files.iter().map(|(_, file)| file.as_fd()).collect();
        let fabric = self.fabric.iter().map(|exported| exported.fabric_handles()[0].data).collect();
        let (socket, said, honest) = (Some(socket), Vec::new(), Vec::new());
        Peer { files, fabric, uuid: self.uuid, host: self.host, socket, said, honest, is_fabric: false }
    }

    /// A receiver, of a peer that runs that program.
    pub(crate) fn receive(&self, program: &[u8]) {
        let mut program = Program(program);
        let manner = program.byte();
        let limits = if manner & 2 == 0 { Limits::default() } else { LITTLE };
        self.leave_nothing(|ours, theirs| {
            let mut peer = self.peer(theirs);
            peer.run(&mut program);
            let at_once = manner & 1 == 0;
            drop(self.receive_from(ours, &peer.said, &limits, at_once));
        });
    }

    /// A receiver of twenty honest chunks but for one, which is that file; `at_once` it imports what comes.
    pub(crate) fn receive_one_other(&self, nth: usize, file: usize, at_once: bool) -> Result<(), Error> {
        self.leave_nothing(|ours, theirs| self.receive_twenty(ours, self.peer(theirs), (nth, file), at_once))
    }

    /// The same by fabric handle.
    pub(crate) fn receive_one_other_fabric(&self, nth: usize, handle: usize, at_once: bool) -> Result<(), Error> {
        self.leave_nothing(|ours, theirs| {
            let peer = Peer { is_fabric: true, ..self.peer(theirs) };
            self.receive_twenty(ours, peer, (nth, handle), at_once)
        })
    }

    fn receive_twenty(
        &self,
        ours: &UnixStream,
        mut peer: Peer<'_>,
        (nth, other): (usize, usize),
        at_once: bool,
    ) -> Result<(), Error> {
        peer.announce(&[G as u64; 20], 20 * G as u64);
        let mut handles = vec![0; 20];
        handles[nth] = other;
        peer.send_honestly(&handles);
        self.receive_from(ours, &peer.said, &Limits::default(), at_once)
    }

    /// Receives what is there, and demands that the driver was asked nothing that was not looked at before.
    fn receive_from(&self, ours: &UnixStream, said: &[u8], limits: &Limits, at_once: bool) -> Result<(), Error> {
        *self.watch.asked() = Asked::default();
        let now = Instant::now();
        let received = if at_once {
            receive_buffer(ours, &self.resource, limits, now)
        } else {
            receive(ours, limits, now).and_then(|descriptor| import(&self.resource, descriptor))
        };
        let asked = std::mem::take(&mut *self.watch.asked());
        assert_eq!(asked.unchecked, [0; 0], "given to the driver unchecked");
        match self.announced(said, limits) {
            None => {
                assert_eq!(asked.calls, [], "calls for what was not to be taken");
                assert!(received.is_err(), "taken, and not to be taken");
            }
            Some(announced) => {
                let room = announced.sum.next_multiple_of(ADDRESSES);
                assert!(asked.reserved <= room && asked.mapped <= announced.sum, "{asked:?} of {announced:?}");
                if let Ok(buffer) = &received {
                    let imports = asked.calls.iter().filter(|call| **call == Call::cuMemImportFromShareableHandle);
                    let (chunks, size, sum) = (imports.count(), buffer.size() as u64, asked.mapped);
                    assert_eq!(Announced { chunks, size, sum }, announced);
                }
            }
        }
        received.map(|buffer| buffer.close().unwrap())
    }

    /// A sender, to a peer that runs that program of replies.
    pub(crate) fn send(&self, program: &[u8]) {
        let mut program = Program(program);
        let manner = program.byte();
        self.leave_nothing(|ours, theirs| {
            let mut peer = self.peer(theirs);
            peer.reply(&mut program);
            let said = peer.said;
            let kind = if manner & 2 == 0 { HandleKind::PosixFd } else { HandleKind::Fabric };
            let sent = if manner & 1 == 0 {
                send_buffer(ours, &self.buffer, Instant::now())
            } else {
                export_as(&self.buffer, kind).and_then(|descriptor| send(ours, &descriptor, Instant::now()))
            };
            if sent.is_ok() {
                let accepted = Reply::Accepted.encode();
                assert!(said.windows(accepted.len()).any(|bytes| bytes == accepted), "nobody accepted it: {said:02x?}");
            }
        });
    }

    /// Demands that all is as before when `work` is done with both ends of a socket, and these are closed.
    fn leave_nothing<T>(&self, work: impl FnOnce(&UnixStream, UnixStream) -> T) -> T {
        let (files, live) = (open_files(), self.simulator.live());
        let (ours, theirs) = pair();
        let result = work(&ours, theirs);
        drop(ours);
        // What may take long to close is closed by another thread.
        let deadline = Instant::now() + Duration::from_secs(5);
        while open_files() != files && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(open_files(), files, "open files");
        assert_eq!(self.simulator.live(), live);
        assert_eq!(self.simulator.violations(), []);
        // Both note every call, and millions of programs are tried.
        self.simulator.clear_calls();
        *self.watch.asked() = Asked::default();
        result
    }

    /// What those bytes announce, if it is something that the receiver may take.
    fn announced(&self, said: &[u8], limits: &Limits) -> Option<Announced> {
        let header = said.get(..96)?;
        let number = |at: usize, bytes: usize| {
            header[at..at + bytes].iter().rev().fold(0, |number: u64, byte| (number << 8) | u64::from(*byte))
        };
        let is_zero = |at: usize, bytes: usize| header[at..at + bytes].iter().all(|byte| *byte == 0);
        let chunks = number(88, 4) as usize;
        let is_header = header[..4] == *b"CUVM" && number(4, 2) == 1 && is_zero(6, 2) && is_zero(92, 4);
        let is_here = is_zero(16, 24) || (number(16, 4) == 1 && is_zero(20, 4) && header[24..40] == self.uuid);
        let has_id = !is_zero(40, 16) || is_zero(56, 8);
        let is_fabric = number(12, 4) == u64::from(FABRIC.0);
        // Fabric handles are good on other hosts, too.
        let is_ours = is_fabric || is_zero(64, 16) || header[64..80] == self.host;
        let is_of_a_kind = is_fabric || number(12, 4) == u64::from(POSIX.0);
        let is_acceptable = is_header && is_here && has_id && is_ours && is_of_a_kind;
        if !is_acceptable || chunks > limits.max_handles || number(8, 4) as usize != 96 + 8 * chunks {
            return None;
        }
        let sizes = said.get(96..96 + 8 * chunks)?;
        let mut sum: u64 = 0;
        for size in sizes.chunks_exact(8) {
            let size = u64::from_le_bytes(size.try_into().unwrap());
            sum = sum.checked_add(size).filter(|_| size > 0 && size.is_multiple_of(G as u64))?;
        }
        let size = number(80, 8);
        let fits = size <= sum && (size > 0) == (sum > 0) && sum <= limits.max_bytes as u64;
        fits.then_some(Announced { chunks, size, sum })
    }
}

fn of_both_kinds(driver: &Driver) -> VirtualMemoryResource {
    let device = driver.device(0).unwrap();
    device.probe(POSIX);
    VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::PosixFdAndFabric)).unwrap()
}

/// A handle to so much memory, which nobody else has.
fn handle(resource: &VirtualMemoryResource, size: usize) -> OwnedFd {
    let (_, mut handles) = export(&resource.allocate(size).unwrap()).unwrap().into_parts().unwrap();
    assert_eq!(handles.len(), 1);
    handles.remove(0)
}

fn open(path: &str, flags: OFlags) -> OwnedFd {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

/// Files as the simulator's own handles are: in memory, on a disk, and one that is opened for nothing.
fn no_handles() -> [OwnedFd; 3] {
    let program = "/proc/self/exe";
    [memory_file(), open(program, OFlags::RDONLY), open(program, OFlags::PATH)]
}

/// One of each kind that is not the simulator's.
fn other_files() -> Vec<OwnedFd> {
    let open = |path: &str| open(path, OFlags::RDONLY);
    let (reader, writer) = std::io::pipe().unwrap();
    vec![
        open("/dev/null"),
        open("/dev/urandom"),
        open("/"),
        reader.into(),
        writer.into(),
        pair().0.into(),
        std::net::TcpListener::bind("127.0.0.1:0").unwrap().into(),
        EventFd::new().unwrap().into(),
    ]
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// That bytes are understood alike by all that reads them, and are what is written for what was understood.
pub(crate) fn read(bytes: &[u8]) {
    match wire::decode(bytes) {
        Ok(metadata) => {
            metadata.check().unwrap();
            assert_eq!(wire::encode(&metadata).unwrap(), bytes);
            // It can be kept with the handles that it announces, and with no others.
            let is_of_files = metadata.handle_kind != FABRIC;
            let made = BufferDescriptor::new(metadata.clone(), Vec::<OwnedFd>::new());
            assert_eq!(made.is_ok(), metadata.sizes.is_empty() && is_of_files);
        }
        Err(_) => {
            if let Some((preamble, sizes)) = bytes.split_first_chunk() {
                let again = Preamble::decode(preamble).and_then(|preamble| preamble.with_sizes(sizes));
                assert!(again.is_err());
            }
        }
    }
    if let Some((count, _)) = bytes.split_first_chunk()
        && let Ok(handles) = wire::decode_handles(count)
    {
        assert_eq!(wire::encode_handles(handles), *count);
    }
    if let Ok(handles) = wire::decode_fabric_handles(bytes) {
        assert_eq!(wire::encode_fabric_handles(&handles), bytes);
    }
    if let Some((reply, _)) = bytes.split_first_chunk()
        && let Ok(understood) = Reply::decode(reply)
    {
        assert_eq!(understood.encode(), *reply);
    }
}

/// As [`read`], of a good header of a few chunks with some of its bytes changed.
pub(crate) fn read_changed(program: &[u8]) {
    let mut program = Program(program);
    let sizes = (1..=program.number() % 5).map(|chunk| chunk * 4096).collect();
    let mut metadata = cuvmm_ipc::Metadata::new(sizes);
    metadata.handle_kind = CUmemAllocationHandleType(program.byte().into());
    let mut header = wire::encode(&metadata).unwrap();
    while !program.0.is_empty() {
        let (at, byte) = (program.number(), program.byte());
        match header.get_mut(at) {
            Some(place) => *place = byte,
            None => header.truncate(usize::from(byte)),
        }
    }
    read(&header);
}
