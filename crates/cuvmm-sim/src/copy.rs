//! Copies, sets, host functions and plain device memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;

use crate::capture;
use crate::context::{self, device_of};
use crate::create;
use crate::map;
use crate::reserve;
use crate::session::{Answer, Session};
use crate::state::{Grantee, Home, Mapping, Plain, Reservation};
use crate::stream::Step;
use crate::work::{HostCall, HostPointer, Place, Work};

/// A side of a copy as the caller names it: an address in the unified space.
#[derive(Clone, Copy)]
pub(crate) struct Side {
    pub(crate) address: u64,
    /// The context to see it from; none for the stream's.
    pub(crate) context: Option<CUcontext>,
    /// Whether it may be the host's. What is declared a device address is never taken for one.
    pub(crate) may_be_host: bool,
}

impl Side {
    /// A device address.
    pub(crate) fn device(address: CUdeviceptr) -> Self {
        Self { address: address.0, context: None, may_be_host: false }
    }

    /// An address of either kind.
    pub(crate) fn unified(address: CUdeviceptr) -> Self {
        Self { may_be_host: true, ..Self::device(address) }
    }

    /// A host pointer, which can still turn out to be a device's.
    pub(crate) fn host<T>(pointer: *const T) -> Self {
        Self::unified(CUdeviceptr(pointer.expose_provenance() as u64))
    }

    /// A device address, as seen from a context.
    pub(crate) fn of(address: CUdeviceptr, context: CUcontext) -> Self {
        Self { context: Some(context), ..Self::device(address) }
    }
}

fn device_for(session: &Session<'_>, side: Side, device: i32) -> Answer<i32> {
    match side.context {
        None => Ok(device),
        Some(named) => {
            let id = named.0.addr() as u64;
            let alive = session.contexts.get(&id).is_some_and(|context| context.alive);
            if alive { Ok(device_of(session, id)) } else { Err(CUresult::INVALID_CONTEXT) }
        }
    }
}

/// Where a side is.
fn place(session: &Session<'_>, side: Side, device: i32) -> Answer<Place> {
    let address = side.address;
    if session.reservation_at(address).is_some() || session.mapping_at(address).is_some() {
        return Ok(Place::Device { address, device });
    }
    if address == 0 || !side.may_be_host {
        return Err(CUresult::INVALID_VALUE);
    }
    Ok(Place::Host(HostPointer(std::ptr::with_exposed_provenance_mut(address as usize))))
}

/// A real driver takes what it has no memory at for the host's, where the kind of an address is not declared, and then
/// crashes at a reserved one.
fn refuse_taken_for_the_hosts(session: &mut Session<'_>, sides: [Side; 2]) -> Answer {
    for side in sides.into_iter().filter(|side| side.may_be_host) {
        if session.reservation_at(side.address).is_some() && session.mapping_at(side.address).is_none() {
            session.violation("a copy of reserved addresses as if they were the host's, which crashes a real driver");
            return Err(CUresult::INVALID_VALUE);
        }
    }
    Ok(())
}

/// Refuses a copy of memory that may not be used so now. A real driver crashes at one to or from the host's own memory
/// across mappings of host memory of which the host was granted one and not another.
pub(crate) fn refuse_unusable(session: &mut Session<'_>, copy: &Work) -> Answer {
    copy.refuse_unusable(session)?;
    if let [(start, end)] = copy.spans()[..]
        && session.is_partly_granted_to_host(start, end)
    {
        session.violation("a copy across host memory granted to the host in part, which crashes a real driver");
        return Err(CUresult::INVALID_VALUE);
    }
    Ok(())
}

/// The work of a copy by a device, wherever its memory may be used.
pub(crate) fn copy_work(session: &Session<'_>, device: i32, to: Side, from: Side, bytes: usize) -> Answer<Work> {
    let (to_device, from_device) = (device_for(session, to, device)?, device_for(session, from, device)?);
    Ok(Work::Copy { to: place(session, to, to_device)?, from: place(session, from, from_device)?, bytes })
}

/// A copy that returns when the host may use its side: at once between devices.
pub(crate) fn copy(session: &mut Session<'_>, to: Side, from: Side, bytes: usize) -> Answer {
    let context = context::working(session)?;
    if bytes == 0 {
        return Ok(());
    }
    refuse_taken_for_the_hosts(session, [to, from])?;
    let work = copy_work(session, device_of(session, context), to, from, bytes)?;
    refuse_unusable(session, &work)?;
    let stream = session.stream(CUstream::LEGACY)?;
    capture::refuse_legacy(session, stream)?;
    let spans = work.spans();
    if spans.len() == 2 {
        return session.enqueue(stream, work, spans, false).map(|_| ());
    }
    let number = session.enqueue(stream, work, spans, true)?;
    // Whoever waits takes the next turn, be it his own or another waiting thread's.
    while session.pending.contains_key(&number) {
        match session.step(stream, true) {
            Step::Run(turn, work) => session.perform(stream, turn, &work),
            Step::Wait | Step::End => session.advance(&[number]),
        }
    }
    context::intact(session, context)
}

/// A copy on a stream. Host memory is taken as pageable: a source is copied before the call returns, and a call
/// with a host destination, or a large source, returns after the copy.
pub(crate) fn copy_async(session: &mut Session<'_>, to: Side, from: Side, bytes: usize, stream: CUstream) -> Answer {
    let (stream, context) = session.working_stream(stream)?;
    if bytes == 0 {
        return Ok(());
    }
    refuse_taken_for_the_hosts(session, [to, from])?;
    let work = copy_work(session, device_of(session, context), to, from, bytes)?;
    let waits = work.is_waited_for();
    let captured = capture::enter(session, stream)?.is_some();
    refuse_unusable(session, &work)?;
    if captured {
        session.record(stream, work);
        return Ok(());
    }
    let work = match work {
        Work::Copy { to, from, bytes } => Work::Copy { to, from: from.taken(bytes), bytes },
        other => other,
    };
    let spans = work.spans();
    let number = session.enqueue(stream, work, spans, false)?;
    if waits {
        session.wait_for_all(vec![number]).inspect_err(|_| session.take_back(stream))?;
        context::intact(session, context)?;
    }
    Ok(())
}

/// A set, on the legacy default stream where none is given. It never waits.
pub(crate) fn fill(
    session: &mut Session<'_>,
    address: CUdeviceptr,
    element: &[u8],
    count: usize,
    stream: Option<CUstream>,
) -> Answer {
    let (id, context) = session.working_stream(stream.unwrap_or(CUstream::LEGACY))?;
    let Some(work) = fill_work(session, context, address, element, count)? else { return Ok(()) };
    submit(session, id, work)
}

/// The work of a set, if there is any, wherever its memory may be used.
pub(crate) fn fill_work(
    session: &Session<'_>,
    context: u64,
    address: CUdeviceptr,
    element: &[u8],
    count: usize,
) -> Answer<Option<Work>> {
    let bytes = count.checked_mul(element.len()).ok_or(CUresult::INVALID_VALUE)?;
    if bytes == 0 {
        return Ok(None);
    }
    if !address.0.is_multiple_of(element.len() as u64) {
        return Err(CUresult::INVALID_VALUE);
    }
    let device = device_of(session, context);
    Ok(Some(Work::Fill { to: address.0, device, pattern: element.into(), bytes }))
}

/// Queues work on a stream, if its memory may be used so, or records it, whose memory is looked at later.
pub(crate) fn submit(session: &mut Session<'_>, stream: u64, work: Work) -> Answer {
    match capture::enter(session, stream)? {
        Some(_) => session.record(stream, work),
        None => {
            work.refuse_unusable(session)?;
            let spans = work.spans();
            session.enqueue(stream, work, spans, false)?;
        }
    }
    Ok(())
}

pub(crate) fn launch_host(session: &mut Session<'_>, stream: CUstream, call: HostCall) -> Answer {
    let (stream, _) = session.working_stream(stream)?;
    if call.function.is_none() {
        return Err(CUresult::INVALID_VALUE);
    }
    submit(session, stream, Work::Host(call))
}

pub(crate) fn allocate(session: &mut Session<'_>, size: usize) -> Answer<CUdeviceptr> {
    let context = context::working(session)?;
    capture::refuse_unsafe(session)?;
    if size == 0 {
        return Err(CUresult::INVALID_VALUE);
    }
    let unit = session.shared.machine.address_unit();
    let bytes = size.checked_next_multiple_of(unit).ok_or(CUresult::OUT_OF_MEMORY)?;
    let device = device_of(session, context);
    let home = Home::Device(device);
    create::claim(session, home, bytes)?;
    let properties = CUmemAllocationProp::pinned(CUmemLocation::device(device), CUmemAllocationHandleType::NONE);
    let memory = Arc::new(create::make(session, bytes, properties, home)?);
    let range = session.place(bytes as u64, unit as u64)?;
    let start = range.start();
    let memory_id = session.add_physical(memory.clone(), home);
    if let Some(physical) = session.physical.get_mut(&memory_id) {
        physical.users = 1;
    }
    let access = BTreeMap::from([(Grantee::Device(device), CUmemAccess_flags::READWRITE)]);
    let buffer_id = session.number();
    session.reservations.insert(start, Reservation { bytes: bytes as u64, plain: true, range });
    let plain = Some(Plain { context, bytes: size as u64 });
    let mapping = Mapping { bytes: bytes as u64, handle: None, memory_id, memory, access, buffer_id, plain };
    session.mappings.insert(start, mapping);
    Ok(CUdeviceptr(start))
}

/// Frees plain memory, after all work of its context.
pub(crate) fn free(session: &mut Session<'_>, address: CUdeviceptr) -> Answer {
    if address.0 == 0 {
        return Ok(());
    }
    context::working(session)?;
    capture::refuse_unsafe(session)?;
    let plain = |session: &Session<'_>| session.mappings.get(&address.0).and_then(|mapping| mapping.plain);
    let context = plain(session).ok_or(CUresult::INVALID_VALUE)?.context;
    session.wait_until_ended(|state| state.last_in(context));
    // Another thread may have freed it meanwhile.
    plain(session).ok_or(CUresult::INVALID_VALUE)?;
    map::remove(session, address.0);
    reserve::remove(session, address.0);
    Ok(())
}

/// How much is free on the current device, and how much there is.
pub(crate) fn info(session: &mut Session<'_>) -> Answer<(usize, usize)> {
    let context = context::working(session)?;
    let device = device_of(session, context);
    let total = session.shared.machine.device(device).map_or(0, |device| device.total_memory);
    let used = session.used_by(Home::Device(device));
    Ok((total.saturating_sub(used), total))
}
