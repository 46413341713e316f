//! What must not be recycled: memory that somebody else has, or may have, would show them what its next owner writes.
//!
//! # Safety
//! What is wrapped or taken over is the test's own, which refers to nothing in it.
#![allow(unsafe_code)]

use std::sync::Arc;

use cuvmm::driver::sys::{CUmemAllocationHandleType, CUmemAllocationProp};
use cuvmm::handles::{Allocation, Mapping, Reservation};
use cuvmm::ipc::{export, import_from};
use cuvmm::resource::Error;
use cuvmm::{
    CUresult, Call, HandleKind, Options, Recycling, Release, Request, VirtualMemoryBuffer, VirtualMemoryResource,
};
use cuvmm_sim::When;
use cuvmm_tests::{Backend, ForeignRange, G, ROOM, bytes_of};

use crate::{BUDGET, kept, options};

const RECYCLING: Recycling = Recycling::up_to(BUDGET);

fn sharing() -> Options {
    options().handle_kind(HandleKind::PosixFd).recycling(RECYCLING.shareable())
}

/// Closes a buffer, and demands that nothing of it is kept: what it had is not the next one's.
#[track_caller]
fn require_not_kept(backend: &Backend, buffer: VirtualMemoryBuffer) {
    let (resource, size) = (buffer.resource().clone(), buffer.size());
    let (before, made) = (kept(&resource), backend.ledger.count(Call::cuMemCreate));
    buffer.close().unwrap();
    assert_eq!(kept(&resource), before);
    let next = resource.allocate(size).unwrap();
    assert_eq!(backend.ledger.count(Call::cuMemCreate), made + 1);
    next.close().unwrap();
    resource.trim(before).unwrap();
}

/// Closes a buffer, and demands that all of it is kept.
#[track_caller]
fn require_kept(buffer: VirtualMemoryBuffer) {
    let (resource, size) = (buffer.resource().clone(), buffer.size());
    let before = kept(&resource);
    buffer.close().unwrap();
    assert_eq!(kept(&resource), before + size);
    resource.trim(before).unwrap();
}

/// Demands that options which ask for what is not kept are refused, rather than taken in silence.
#[track_caller]
fn require_refused(backend: &Backend, options: Options) {
    let refused = VirtualMemoryResource::new(&backend.device, options);
    assert!(matches!(refused, Err(Error::Recycling { .. } | Error::RecyclingBudget { .. })), "{refused:?}");
}

pub(crate) fn memory_that_can_be_shared_is_refused_unless_it_is_opted_in(backend: &Backend) {
    require_refused(backend, options().handle_kind(HandleKind::PosixFd));
    let resource = backend.resource_with(sharing());
    assert!(resource.is_recycling());
    require_kept(resource.allocate(G).unwrap());
}

pub(crate) fn memory_that_network_cards_reach_is_refused_unless_it_is_opted_in(backend: &Backend) {
    let options = options().rdma(Request::IfSupported);
    require_refused(backend, options.clone());
    require_kept(backend.resource_with(options.recycling(RECYCLING.shareable())).allocate(G).unwrap());
}

pub(crate) fn memory_that_was_exported_is_not(backend: &Backend) {
    let resource = backend.resource_with(sharing());
    let buffer = resource.allocate_with_capacity(G, ROOM).unwrap().grow_into(3 * G).unwrap();
    let first = buffer.truncate(G).unwrap();
    drop(export(&first).unwrap());
    first.close().unwrap();
    buffer.close().unwrap();
    assert_eq!(kept(&resource), 2 * G, "the second chunk was not exported");
    resource.trim(0).unwrap();
    // Also by the handle alone, and while the descriptor is there.
    let buffer = resource.allocate(G).unwrap();
    let descriptor = buffer.mappings()[0].allocation().export_posix_fd().unwrap();
    require_not_kept(backend, buffer);
    drop(descriptor);
}

pub(crate) fn memory_whose_export_was_attempted_is_not(backend: &Backend) {
    let resource = backend.resource_with(sharing());
    let buffer = resource.allocate(G).unwrap();
    backend.faults.fail(Call::cuMemExportToShareableHandle, 1, CUresult::UNKNOWN, When::Before);
    export(&buffer).unwrap_err();
    require_not_kept(backend, buffer);
    // What is refused without a call was no attempt.
    let plain = backend.resource_with(options()).allocate(G).unwrap();
    export(&plain).unwrap_err();
    require_kept(plain);
}

pub(crate) fn memory_that_a_dma_buf_was_asked_for_is_not(backend: &Backend) {
    let resource = backend.resource_with(options());
    let buffer = resource.allocate(G).unwrap();
    // Whether the machine has any.
    drop(buffer.mappings()[0].export_dma_buf());
    require_not_kept(backend, buffer);
    let buffer = resource.allocate(G).unwrap();
    backend.faults.fail(Call::cuMemGetHandleForAddressRange, 1, CUresult::UNKNOWN, When::Before);
    buffer.mappings()[0].export_dma_buf().unwrap_err();
    require_not_kept(backend, buffer);
    backend.faults.clear();
}

pub(crate) fn memory_that_was_imported_is_not(backend: &Backend) {
    let [exporter, importer] = [(); 2].map(|()| backend.resource_with(sharing()));
    let buffer = exporter.allocate(G).unwrap();
    let descriptor = export(&buffer).unwrap();
    let imported = import_from(&importer, &descriptor).unwrap();
    drop(descriptor);
    buffer.close().unwrap();
    // What is grown behind it is.
    let grown = imported.grow_into(3 * G).unwrap();
    grown.close().unwrap();
    assert_eq!((kept(&exporter), kept(&importer)), (0, 2 * G));
}

pub(crate) fn memory_that_is_wrapped_is_not_while_it_is(backend: &Backend) {
    let (resource, other) = (backend.resource_with(options()), backend.resource());
    let buffer = resource.allocate(G).unwrap();
    buffer.fill(0, G, 0x11).unwrap();
    // SAFETY: the memory is the test's.
    let [wrapper, gone] = [(); 2].map(|()| unsafe { other.wrap(buffer.address(), G) }.unwrap());
    gone.close().unwrap();
    require_not_kept(backend, buffer);
    let next = resource.allocate(G).unwrap();
    next.fill(0, G, 0x22).unwrap();
    assert_eq!(bytes_of(&wrapper), [0x11; G]);
    // Where the other is gone before, nobody else has it.
    // SAFETY: as above.
    let second = unsafe { other.wrap(next.address(), G) }.unwrap();
    second.close().unwrap();
    require_kept(next);
    wrapper.close().unwrap();
    // What only looks is no owner.
    let buffer = resource.allocate(G).unwrap();
    assert!(other.is_vmm(buffer.address()).unwrap());
    require_kept(buffer);
}

pub(crate) fn memory_that_was_wrapped_and_exported_is_not(backend: &Backend) {
    let (resource, other) = (backend.resource_with(options()), backend.resource());
    let buffer = resource.allocate(G).unwrap();
    // SAFETY: the memory is the test's.
    let wrapper = unsafe { other.wrap(buffer.address(), G) }.unwrap();
    // Whether the machine has any.
    drop(wrapper.mappings()[0].export_dma_buf());
    wrapper.close().unwrap();
    require_not_kept(backend, buffer);
}

pub(crate) fn memory_that_is_taken_over_is_not(backend: &Backend) {
    let resource = backend.resource_with(options());
    let range = ForeignRange::make(backend, backend.device.location(), &[2], ROOM);
    // SAFETY: the range is the test's to give away.
    let buffer = unsafe { resource.from_raw(range.address, range.size, Release::Caller) }.unwrap();
    let grown = buffer.grow_into(5 * G).unwrap();
    grown.close().unwrap();
    assert_eq!(kept(&resource), 3 * G, "what was added is");
}

pub(crate) fn memory_that_others_made_is_not(backend: &Backend) {
    let resource = backend.resource_with(options());
    let properties = CUmemAllocationProp::pinned(backend.device.location(), CUmemAllocationHandleType::NONE);
    let buffer = resource.map_chunks(&[G, 2 * G], 3 * G, |_, size| {
        Ok::<_, Error>(Allocation::create(&backend.driver, size, &properties)?)
    });
    require_not_kept(backend, buffer.unwrap());
}

pub(crate) fn memory_that_somebody_has_a_share_of_is_not(backend: &Backend) {
    let resource = backend.resource_with(options());
    let buffer = resource.allocate(G).unwrap();
    let share = Arc::clone(buffer.mappings()[0].allocation());
    let access = Arc::clone(buffer.mappings()[0].access());
    let range = Reservation::reserve(&backend.driver, Reservation::GRANULARITY.exact(G).unwrap(), 0).unwrap();
    let elsewhere = Mapping::map(&Arc::new(range), 0, share, access).unwrap();
    require_not_kept(backend, buffer);
    elsewhere.close().unwrap();
    assert_eq!(resource.statistics().physical.now, 0);
}

pub(crate) fn options_that_keep_nothing_are_refused(backend: &Backend) {
    let none = std::time::Duration::ZERO;
    for recycling in [Recycling::up_to(0), Recycling::up_to(G - 1), RECYCLING.for_at_most(none)] {
        require_refused(backend, Options::new().recycling(recycling));
    }
    let resource = backend.resource_with(Options::new().recycling(Recycling::up_to(G)));
    assert!(resource.is_recycling() && !backend.resource().is_recycling());
}
