//! Reservations, physical memory, mappings and access.

use cuvmm_driver::sys::*;

use super::arguments::location_name;
use super::{Args, Entry, Reply};

pub(super) const TABLE: &[Entry] = &[
    Entry::call("reserve", reserve),
    Entry::call("free", free),
    Entry::call("create", create),
    Entry::call("release", release),
    Entry::call("retain", retain),
    Entry::call("properties", properties),
    Entry::call("granularity", granularity),
    Entry::call("map", map),
    Entry::call("unmap", unmap),
    Entry::call("grant", grant),
    Entry::call("access", access),
];

fn reserve(args: &mut Args<'_>) -> Result<Reply, String> {
    let size = args.size()?;
    let alignment = args.option("align", 0)? as usize;
    let hint = CUdeviceptr(args.option("at", 0)?);
    let flags = args.option("flags", 0)?;
    let mut address = CUdeviceptr::default();
    let output = args.output(&mut address)?;
    let code = call!(args, cuMemAddressReserve(output, size, alignment, hint, flags));
    Ok(Reply::code(code).output(address.0))
}

fn free(args: &mut Args<'_>) -> Result<Reply, String> {
    let (address, size) = (args.address()?, args.size()?);
    Ok(Reply::code(call!(args, cuMemAddressFree(address, size))))
}

/// The properties that `create` and `granularity` are asked with; none for `prop=null`.
fn asked_properties(args: &mut Args<'_>) -> Result<Option<CUmemAllocationProp>, String> {
    let location = args.option_word("on").unwrap_or("device:0");
    let location = args.location(location)?;
    let kinds = CUmemAllocationHandleType(args.option("kinds", 0)? as u32);
    let mut properties = CUmemAllocationProp::pinned(location, kinds);
    properties.allocation_type = CUmemAllocationType(args.option("type", 1)? as u32);
    let flags = &mut properties.alloc_flags;
    flags.gpu_direct_rdma_capable = args.option("rdma", 0)? as u8;
    flags.compression_type = args.option("compression", 0)? as u8;
    flags.usage = args.option("usage", 0)? as u16;
    flags.reserved = [args.option("reserved", 0)? as u8; 4];
    match args.option_word("prop") {
        None => Ok(Some(properties)),
        Some("null") => Ok(None),
        Some(other) => Err(format!("prop={other}: only null can be said")),
    }
}

fn create(args: &mut Args<'_>) -> Result<Reply, String> {
    let size = args.size()?;
    let properties = asked_properties(args)?;
    let properties = properties.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let flags = args.option("flags", 0)?;
    let mut handle = CUmemGenericAllocationHandle::default();
    let output = args.output(&mut handle)?;
    let code = call!(args, cuMemCreate(output, size, properties, flags));
    Ok(Reply::code(code).output(handle.0))
}

fn granularity(args: &mut Args<'_>) -> Result<Reply, String> {
    let properties = asked_properties(args)?;
    let properties = properties.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let option = CUmemAllocationGranularity_flags(args.option("option", 0)? as u32);
    let mut bytes = 0_usize;
    let output = args.output(&mut bytes)?;
    let code = call!(args, cuMemGetAllocationGranularity(output, properties, option));
    Ok(Reply::code(code).number(bytes as u64))
}

fn handle(args: &mut Args<'_>) -> Result<CUmemGenericAllocationHandle, String> {
    args.value().map(CUmemGenericAllocationHandle)
}

fn release(args: &mut Args<'_>) -> Result<Reply, String> {
    let handle = handle(args)?;
    Ok(Reply::code(call!(args, cuMemRelease(handle))))
}

fn retain(args: &mut Args<'_>) -> Result<Reply, String> {
    let address = args.pointer()?;
    let mut handle = CUmemGenericAllocationHandle::default();
    let output = args.output(&mut handle)?;
    let code = call!(args, cuMemRetainAllocationHandle(output, address));
    Ok(Reply::code(code).output(handle.0))
}

fn properties(args: &mut Args<'_>) -> Result<Reply, String> {
    let handle = handle(args)?;
    let mut found = CUmemAllocationProp::default();
    let output = args.output(&mut found)?;
    let code = call!(args, cuMemGetAllocationPropertiesFromHandle(output, handle));
    let flags = found.alloc_flags;
    Ok(Reply::code(code).tell(format!(
        "type={} on={} kinds={} rdma={} compression={} usage={}",
        found.allocation_type.0,
        location_name(found.location),
        found.requested_handle_types.0,
        flags.gpu_direct_rdma_capable,
        flags.compression_type,
        flags.usage
    )))
}

fn map(args: &mut Args<'_>) -> Result<Reply, String> {
    let (address, size, handle) = (args.address()?, args.size()?, handle(args)?);
    let offset = args.option("offset", 0)? as usize;
    let flags = args.option("flags", 0)?;
    Ok(Reply::code(call!(args, cuMemMap(address, size, offset, handle, flags))))
}

fn unmap(args: &mut Args<'_>) -> Result<Reply, String> {
    let (address, size) = (args.address()?, args.size()?);
    Ok(Reply::code(call!(args, cuMemUnmap(address, size))))
}

fn grant(args: &mut Args<'_>) -> Result<Reply, String> {
    let (address, size) = (args.address()?, args.size()?);
    let is_null = args.option_word("desc").is_some();
    let mut grants = Vec::new();
    for (location, flags) in args.rest_named() {
        let flags = match flags {
            "none" => CUmemAccess_flags::NONE,
            "r" => CUmemAccess_flags::READ,
            "rw" => CUmemAccess_flags::READWRITE,
            number => CUmemAccess_flags(args.scene.evaluate(number)?.bits as u32),
        };
        grants.push(CUmemAccessDesc { location: args.location(location)?, flags });
    }
    // NULL stands for one descriptor that is not there.
    let (descriptors, count) = if is_null { (std::ptr::null(), 1) } else { (grants.as_ptr(), grants.len()) };
    Ok(Reply::code(call!(args, cuMemSetAccess(address, size, descriptors, count))))
}

fn access(args: &mut Args<'_>) -> Result<Reply, String> {
    let address = args.address()?;
    let location = args.option_word("of").unwrap_or("device:0");
    let location = if location == "null" { None } else { Some(args.location(location)?) };
    let location = location.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let mut flags = 0_u64;
    let output = args.output(&mut flags)?;
    let code = call!(args, cuMemGetAccess(output, location, address));
    Ok(Reply::code(code).number(flags))
}
