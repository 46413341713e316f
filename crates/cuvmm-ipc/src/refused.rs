//! What must not compile, each beside the same with one line other, or one line less, that does: so it is that line that
//! is refused, whatever a compiler's words for it are.

/// A descriptor that was imported by value is gone, and its handles are closed.
///
/// ```compile_fail,E0382
/// # use cuvmm_ipc::*;
/// # use cuvmm_resource::*;
/// fn example(resource: &VirtualMemoryResource, descriptor: BufferDescriptor) -> Result<(), cuvmm_ipc::Error> {
///     let buffer = import(resource, descriptor)?;
///     let again = import(resource, descriptor)?;
///     Ok(())
/// }
/// ```
///
/// ```
/// # use cuvmm_ipc::*;
/// # use cuvmm_resource::*;
/// fn example(resource: &VirtualMemoryResource, descriptor: BufferDescriptor) -> Result<(), cuvmm_ipc::Error> {
///     let buffer = import(resource, descriptor)?;
///     Ok(())
/// }
/// ```
struct ImportedTwice;

/// A handle is not used when its descriptor is gone.
///
/// ```compile_fail,E0505
/// # use cuvmm_ipc::BufferDescriptor;
/// fn example(descriptor: BufferDescriptor) -> usize {
///     let handles = descriptor.fds();
///     drop(descriptor);
///     handles.len()
/// }
/// ```
///
/// ```
/// # use cuvmm_ipc::BufferDescriptor;
/// fn example(descriptor: BufferDescriptor) -> usize {
///     let handles = descriptor.fds();
///     handles.len()
/// }
/// ```
struct HandlesAfterTheDescriptor;
