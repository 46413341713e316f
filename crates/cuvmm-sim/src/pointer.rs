//! Asking about addresses.

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;

use crate::context::{self, device_of};
use crate::session::{Answer, Session};
use crate::state::{Grantee, Mapping};

/// The value of an attribute, by its width.
pub(crate) enum Value {
    Bool(bool),
    Int(u32),
    Long(u64),
}

/// The one mapping around an address.
pub(crate) fn range(session: &mut Session<'_>, address: CUdeviceptr) -> Answer<(CUdeviceptr, usize)> {
    context::current(session)?;
    let (start, mapping) = session.mapping_at(address.0).ok_or(CUresult::NOT_FOUND)?;
    Ok((CUdeviceptr(start), mapping.bytes as usize))
}

pub(crate) fn attribute(
    session: &mut Session<'_>,
    attribute: CUpointer_attribute,
    address: CUdeviceptr,
) -> Answer<Value> {
    let device = context::current(session).ok().map(|context| device_of(session, context));
    let (start, mapping) = session.mapping_at(address.0).ok_or(CUresult::INVALID_VALUE)?;
    if attribute.0 >= CUpointer_attribute::MAPPING_SIZE.0 && session.shared.machine.driver_version.0 < 11070 {
        return Err(CUresult::INVALID_VALUE);
    }
    let properties = &mapping.memory.properties;
    let on_device = properties.location.location_type == CUmemLocationType::DEVICE;
    let reservation = session.reservation_at(address.0).map(|(from, found)| (from, found.bytes));
    Ok(match attribute {
        CUpointer_attribute::CONTEXT => Value::Long(mapping.context.unwrap_or(0)),
        CUpointer_attribute::MEMORY_TYPE => {
            Value::Int(if on_device { CUmemorytype::DEVICE.0 } else { CUmemorytype::HOST.0 })
        }
        CUpointer_attribute::DEVICE_POINTER => Value::Long(address.0),
        CUpointer_attribute::HOST_POINTER if !on_device => Value::Long(address.0),
        CUpointer_attribute::SYNC_MEMOPS | CUpointer_attribute::IS_MANAGED => Value::Bool(false),
        CUpointer_attribute::IS_LEGACY_CUDA_IPC_CAPABLE => Value::Bool(mapping.handle.is_none()),
        CUpointer_attribute::BUFFER_ID => Value::Long(mapping.buffer_id),
        CUpointer_attribute::DEVICE_ORDINAL => {
            Value::Int(if on_device { properties.location.id } else { -1 }.cast_unsigned())
        }
        CUpointer_attribute::RANGE_START_ADDR => Value::Long(reservation.map_or(start, |(from, _)| from)),
        CUpointer_attribute::RANGE_SIZE => Value::Long(reservation.map_or(mapping.bytes, |(_, bytes)| bytes)),
        CUpointer_attribute::MAPPED => Value::Bool(true),
        CUpointer_attribute::ALLOWED_HANDLE_TYPES => Value::Int(properties.requested_handle_types.0),
        CUpointer_attribute::IS_GPU_DIRECT_RDMA_CAPABLE => {
            Value::Bool(properties.alloc_flags.gpu_direct_rdma_capable != 0)
        }
        CUpointer_attribute::ACCESS_FLAGS => Value::Int(granted(mapping, device)),
        CUpointer_attribute::MAPPING_SIZE => Value::Long(mapping.bytes),
        CUpointer_attribute::MAPPING_BASE_ADDR => Value::Long(start),
        CUpointer_attribute::MEMORY_BLOCK_ID => Value::Long(mapping.memory_id),
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
    if session.mapping_at(address.0).is_some() {
        return attribute(session, asked, address);
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

/// SYNC_MEMOPS, the one attribute that can be set, is not for memory of the virtual memory calls.
pub(crate) fn set_attribute(session: &Session<'_>, attribute: CUpointer_attribute, address: CUdeviceptr) -> Answer {
    if attribute != CUpointer_attribute::SYNC_MEMOPS {
        return Err(CUresult::INVALID_VALUE);
    }
    match session.mapping_at(address.0) {
        None => Err(CUresult::INVALID_VALUE),
        Some((_, mapping)) if mapping.handle.is_some() => Err(CUresult::NOT_SUPPORTED),
        Some(_) => Ok(()),
    }
}
