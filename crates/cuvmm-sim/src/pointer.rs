//! Asking about addresses.

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;

use crate::context::{self, device_of};
use crate::create::properties_by;
use crate::session::{Answer, Session};
use crate::state::{Grantee, Mapping};

/// The pool that memory is of: none is modelled.
const MEMPOOL_HANDLE: CUpointer_attribute = CUpointer_attribute(17);

/// The value of an attribute, by its width.
pub(crate) enum Value {
    Bool(bool),
    Int(u32),
    Long(u64),
}

/// The one mapping around an address, if the current context's device was granted it.
pub(crate) fn range(session: &mut Session<'_>, address: CUdeviceptr) -> Answer<(CUdeviceptr, usize)> {
    let context = context::current(session)?;
    let device = device_of(session, context);
    let (start, mapping) = session.mapping_at(address.0).ok_or(CUresult::NOT_FOUND)?;
    match granted(mapping, Some(device)) {
        0 => Err(CUresult::NOT_FOUND),
        _ if session.policy.host_range_has_no_base && !is_on_device(mapping) => {
            Ok((CUdeviceptr(0), asked_bytes(mapping) as usize))
        }
        _ => Ok((CUdeviceptr(start), asked_bytes(mapping) as usize)),
    }
}

fn is_on_device(mapping: &Mapping) -> bool {
    mapping.memory.properties.location.location_type == CUmemLocationType::DEVICE
}

/// How much somebody asked for.
fn asked_bytes(mapping: &Mapping) -> u64 {
    mapping.plain.as_ref().map_or(mapping.bytes, |plain| plain.bytes)
}

pub(crate) fn attribute(
    session: &mut Session<'_>,
    attribute: CUpointer_attribute,
    address: CUdeviceptr,
) -> Answer<Value> {
    let current = context::current(session);
    let device = current.ok().map(|context| device_of(session, context));
    let (start, mapping) = session.mapping_at(address.0).ok_or(CUresult::INVALID_VALUE)?;
    if attribute.0 >= CUpointer_attribute::MAPPING_SIZE.0 && session.shared.machine.driver_version.0 < 11070 {
        return Err(CUresult::INVALID_VALUE);
    }
    let handle = mapping.handle.and_then(|value| session.handles.get(&value));
    let properties = properties_by(&mapping.memory, handle.is_some_and(|handle| handle.imported));
    let on_device = is_on_device(mapping);
    let reservation = session.reservation_at(address.0).map(|(from, found)| (from, found.bytes));
    Ok(match attribute {
        CUpointer_attribute::CONTEXT => Value::Long(mapping.plain.as_ref().map_or(0, |plain| plain.context)),
        CUpointer_attribute::MEMORY_TYPE => {
            Value::Int(if on_device { CUmemorytype::DEVICE.0 } else { CUmemorytype::HOST.0 })
        }
        CUpointer_attribute::DEVICE_POINTER if device.is_none() => return current.map(Value::Long),
        CUpointer_attribute::DEVICE_POINTER if granted(mapping, device) != 0 => Value::Long(address.0),
        CUpointer_attribute::HOST_POINTER if mapping.access.get(&Grantee::Host).is_some_and(|flags| flags.0 != 0) => {
            Value::Long(address.0)
        }
        CUpointer_attribute::SYNC_MEMOPS | CUpointer_attribute::IS_MANAGED => Value::Bool(false),
        CUpointer_attribute::IS_LEGACY_CUDA_IPC_CAPABLE => Value::Bool(mapping.handle.is_none()),
        CUpointer_attribute::BUFFER_ID => Value::Long(mapping.buffer_id),
        CUpointer_attribute::DEVICE_ORDINAL => {
            Value::Int(if on_device { properties.location.id } else { 0 }.cast_unsigned())
        }
        CUpointer_attribute::RANGE_START_ADDR => Value::Long(reservation.map_or(start, |(from, _)| from)),
        CUpointer_attribute::RANGE_SIZE => Value::Long(match reservation {
            Some((_, bytes)) if mapping.plain.is_none() => bytes,
            _ => asked_bytes(mapping),
        }),
        CUpointer_attribute::MAPPED => Value::Bool(true),
        CUpointer_attribute::ALLOWED_HANDLE_TYPES => Value::Int(properties.requested_handle_types.0),
        CUpointer_attribute::IS_GPU_DIRECT_RDMA_CAPABLE => {
            Value::Bool(properties.alloc_flags.gpu_direct_rdma_capable != 0)
        }
        MEMPOOL_HANDLE => Value::Long(0),
        CUpointer_attribute::ACCESS_FLAGS => Value::Int(granted(mapping, device)),
        CUpointer_attribute::MAPPING_SIZE => Value::Long(mapping.bytes),
        CUpointer_attribute::MAPPING_BASE_ADDR => Value::Long(start),
        CUpointer_attribute::MEMORY_BLOCK_ID => Value::Long(mapping.handle.unwrap_or(mapping.memory_id)),
        _ => return Err(CUresult::INVALID_VALUE),
    })
}

fn granted(mapping: &Mapping, device: Option<i32>) -> u32 {
    device.and_then(|device| mapping.access.get(&Grantee::Device(device))).map_or(0, |flags| flags.0)
}

/// An attribute in the plural form, where a reserved address has its reservation, and an unknown one zeros.
pub(crate) fn attribute_or_zero(
    session: &mut Session<'_>,
    asked: CUpointer_attribute,
    address: CUdeviceptr,
) -> Answer<Value> {
    let is_pointer = matches!(asked, CUpointer_attribute::DEVICE_POINTER | CUpointer_attribute::HOST_POINTER);
    if session.mapping_at(address.0).is_some() {
        return match attribute(session, asked, address) {
            Err(CUresult::INVALID_VALUE) if is_pointer => Ok(Value::Long(0)),
            answer => answer,
        };
    }
    let reservation = session.reservation_at(address.0).map(|(from, found)| (from, found.bytes));
    let (start, bytes) = reservation.unwrap_or_default();
    Ok(match asked {
        CUpointer_attribute::RANGE_START_ADDR => Value::Long(start),
        CUpointer_attribute::RANGE_SIZE => Value::Long(bytes),
        CUpointer_attribute::SYNC_MEMOPS
        | CUpointer_attribute::IS_MANAGED
        | CUpointer_attribute::IS_LEGACY_CUDA_IPC_CAPABLE
        | CUpointer_attribute::MAPPED
        | CUpointer_attribute::IS_GPU_DIRECT_RDMA_CAPABLE => Value::Bool(false),
        CUpointer_attribute::MEMORY_TYPE
        | CUpointer_attribute::DEVICE_ORDINAL
        | CUpointer_attribute::ALLOWED_HANDLE_TYPES
        | CUpointer_attribute::ACCESS_FLAGS => Value::Int(0),
        _ => Value::Long(0),
    })
}

/// Nothing can be set of memory of the virtual memory calls, and SYNC_MEMOPS alone of other memory.
pub(crate) fn set_attribute(session: &Session<'_>, attribute: CUpointer_attribute, address: CUdeviceptr) -> Answer {
    match session.mapping_at(address.0) {
        Some((_, mapping)) if mapping.handle.is_some() => Err(CUresult::NOT_SUPPORTED),
        Some(_) if attribute == CUpointer_attribute::SYNC_MEMOPS => Ok(()),
        _ => Err(CUresult::INVALID_VALUE),
    }
}
