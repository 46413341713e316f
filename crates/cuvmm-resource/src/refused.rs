//! What must not compile, each beside the same with one line other, or one line less, that does: so it is that line that
//! is refused, whatever a compiler's words for it are.

/// A buffer that was closed is gone.
///
/// ```compile_fail,E0382
/// # use cuvmm_resource::*;
/// fn example(buffer: VirtualMemoryBuffer) -> Result<(), CloseError> {
///     buffer.close()?;
///     buffer.address();
///     Ok(())
/// }
/// ```
///
/// ```compile_fail,E0382
/// # use cuvmm_resource::*;
/// fn example(buffer: VirtualMemoryBuffer) -> Result<(), CloseError> {
///     buffer.close()?;
///     buffer.close()?;
///     Ok(())
/// }
/// ```
///
/// ```
/// # use cuvmm_resource::*;
/// fn example(buffer: VirtualMemoryBuffer) -> Result<(), CloseError> {
///     buffer.close()?;
///     Ok(())
/// }
/// ```
struct UsedAfterClose;

/// So is one that was grown or cut in place.
///
/// ```compile_fail,E0382
/// # use cuvmm_resource::*;
/// fn example(buffer: VirtualMemoryBuffer) -> Result<VirtualMemoryBuffer, ResizeError> {
///     let larger = buffer.grow_into(4 << 20)?;
///     buffer.address();
///     Ok(larger)
/// }
/// ```
///
/// ```
/// # use cuvmm_resource::*;
/// fn example(buffer: VirtualMemoryBuffer) -> Result<VirtualMemoryBuffer, ResizeError> {
///     let larger = buffer.grow_into(4 << 20)?;
///     Ok(larger)
/// }
/// ```
///
/// ```compile_fail,E0382
/// # use cuvmm_resource::*;
/// fn example(buffer: VirtualMemoryBuffer) -> Result<VirtualMemoryBuffer, ResizeError> {
///     let shorter = buffer.truncate_into(2 << 20)?;
///     buffer.address();
///     Ok(shorter)
/// }
/// ```
///
/// ```
/// # use cuvmm_resource::*;
/// fn example(buffer: VirtualMemoryBuffer) -> Result<VirtualMemoryBuffer, ResizeError> {
///     let shorter = buffer.truncate_into(2 << 20)?;
///     Ok(shorter)
/// }
/// ```
struct UsedAfterResizing;

/// No mapping of a buffer's is looked at when the buffer is gone.
///
/// ```compile_fail,E0505
/// # use cuvmm_resource::*;
/// fn example(buffer: VirtualMemoryBuffer) -> usize {
///     let mappings = buffer.mappings();
///     drop(buffer);
///     mappings.len()
/// }
/// ```
///
/// ```
/// # use cuvmm_resource::*;
/// fn example(buffer: VirtualMemoryBuffer) -> usize {
///     let mappings = buffer.mappings();
///     mappings.len()
/// }
/// ```
struct MappingsAfterTheBuffer;

/// Who holds a buffer decides when its memory goes: no copy is made in passing.
///
/// ```compile_fail,E0599
/// # use cuvmm_resource::*;
/// fn example(buffer: VirtualMemoryBuffer) -> VirtualMemoryBuffer {
///     let buffer = buffer.clone();
///     buffer
/// }
/// ```
///
/// ```
/// # use cuvmm_resource::*;
/// fn example(buffer: VirtualMemoryBuffer) -> VirtualMemoryBuffer {
///     buffer
/// }
/// ```
struct Cloned;

/// Handle kinds of Windows have no name here.
///
/// ```compile_fail,E0599
/// # use cuvmm_resource::*;
/// fn example() -> Options {
///     let kind = HandleKind::Win32;
///     Options::new().handle_kind(kind)
/// }
/// ```
///
/// ```
/// # use cuvmm_resource::*;
/// fn example() -> Options {
///     let kind = HandleKind::PosixFd;
///     Options::new().handle_kind(kind)
/// }
/// ```
struct Windows;

/// What a resource was made with does not change.
///
/// ```compile_fail,E0594
/// # use cuvmm_resource::*;
/// fn example(resource: &mut VirtualMemoryResource) {
///     let alignment = resource.options().alignment;
///     resource.options().alignment = 2 * alignment;
/// }
/// ```
///
/// ```
/// # use cuvmm_resource::*;
/// fn example(resource: &mut VirtualMemoryResource) {
///     let alignment = resource.options().alignment;
/// }
/// ```
struct OptionsChanged;
