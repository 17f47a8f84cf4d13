//! What a component imports and exports, and how much there is to compile: read before it is compiled.

use wasmparser::{FunctionBody, Operator, Parser, Payload};

/// Functions in one component, which take some 5 KiB each to be compiled, however small. A whole CPython has about 15,000.
const FUNCTIONS_MAX: u64 = 60_000;
/// Code of one function: compilers take more than linear time for it. The largest of CPython have some 100 KiB.
const FUNCTION_BYTES_MAX: u64 = 1 << 20;
/// Blocks in each other in one function, for which compilers take quadratic time. Interpreters have one for each instruction.
const BLOCK_DEPTH_MAX: u64 = 10_000;
/// What a compiler does for each pair of blocks, and for each local in each block, summed over all functions ([`Shape::work`]); from
/// ten seconds, of loops alone, to a minute, with many locals. A whole CPython has an eighth.
const WORK_MAX: u64 = 2_000_000_000;
/// Modules and components in one component, and how deep they lie in each other.
const PARTS_MAX: u64 = 1_000;
const DEPTH_MAX: u64 = 16;

/// What a component itself imports and exports, not the parts in it; and how much there is to compile.
#[derive(Default)]
pub(super) struct Interface<'a> {
    pub(super) imports: Vec<&'a str>,
    pub(super) exports: Vec<&'a str>,
    functions: u64,
    largest_function: u64,
    block_depth: u64,
    work: u64,
    parts: u64,
    depth: u64,
}

/// More than is compiled here, which takes memory and time that nothing else bounds.
#[derive(Debug, thiserror::Error)]
pub(super) enum TooMuch {
    #[error("it has {0} functions; at most {FUNCTIONS_MAX} are compiled")]
    Functions(u64),
    #[error("one of its functions has {0} bytes; at most {FUNCTION_BYTES_MAX} are compiled")]
    FunctionBytes(u64),
    #[error(
        "blocks lie {0} deep in each other in one of its functions; at most {BLOCK_DEPTH_MAX} are compiled"
    )]
    BlockDepth(u64),
    #[error("its functions have so many loops, blocks and locals that it would take too long to compile")]
    Work,
    #[error("{0} modules and components are in it; at most {PARTS_MAX} are compiled")]
    Parts(u64),
    #[error("its parts lie {0} deep in each other; at most {DEPTH_MAX} are compiled")]
    Depth(u64),
}

impl<'a> Interface<'a> {
    pub(super) fn read(bytes: &'a [u8]) -> Result<Self, wasmparser::BinaryReaderError> {
        let mut found = Self::default();
        let mut depth = 0u64;
        for payload in Parser::new(0).parse_all(bytes) {
            match payload? {
                Payload::ModuleSection { .. } | Payload::ComponentSection { .. } => {
                    depth += 1;
                    found.parts += 1;
                    found.depth = found.depth.max(depth);
                }
                // The last one ends the component itself.
                Payload::End(_) => depth = depth.saturating_sub(1),
                Payload::FunctionSection(section) => found.functions += u64::from(section.count()),
                Payload::CodeSectionEntry(body) => {
                    let range = body.range();
                    found.largest_function = found.largest_function.max(range.end - range.start);
                    let shape = Shape::of(&body)?;
                    found.block_depth = found.block_depth.max(shape.depth);
                    found.work = found.work.saturating_add(shape.work());
                }
                Payload::ComponentImportSection(section) if depth == 0 => {
                    for import in section {
                        found.imports.push(import?.name.name);
                    }
                }
                Payload::ComponentExportSection(section) if depth == 0 => {
                    for export in section {
                        found.exports.push(export?.name.name);
                    }
                }
                _ => {}
            }
        }
        Ok(found)
    }

    /// # Errors
    /// The first bound that is passed.
    pub(super) fn check_amount(&self) -> Result<(), TooMuch> {
        let &Self { functions, largest_function, block_depth, work, parts, depth, .. } = self;
        match () {
            () if functions > FUNCTIONS_MAX => Err(TooMuch::Functions(functions)),
            () if largest_function > FUNCTION_BYTES_MAX => Err(TooMuch::FunctionBytes(largest_function)),
            () if block_depth > BLOCK_DEPTH_MAX => Err(TooMuch::BlockDepth(block_depth)),
            () if work > WORK_MAX => Err(TooMuch::Work),
            () if parts > PARTS_MAX => Err(TooMuch::Parts(parts)),
            () if depth > DEPTH_MAX => Err(TooMuch::Depth(depth)),
            () => Ok(()),
        }
    }
}

/// The properties of a function that make a compiler take more than linear time.
#[derive(Default)]
struct Shape {
    /// Without its parameters, of which there are at most 1,000.
    locals: u64,
    /// Loops are blocks, too.
    blocks: u64,
    loops: u64,
    /// How deep the blocks lie in each other.
    depth: u64,
}

impl Shape {
    fn of(body: &FunctionBody<'_>) -> Result<Self, wasmparser::BinaryReaderError> {
        let mut shape = Self::default();
        for group in body.get_locals_reader()? {
            shape.locals += u64::from(group?.0);
        }
        let mut depth = 0u64;
        for operator in body.get_operators_reader()? {
            let operator = operator?;
            match operator {
                Operator::Block { .. }
                | Operator::Loop { .. }
                | Operator::If { .. }
                | Operator::TryTable { .. } => {
                    shape.blocks += 1;
                    shape.loops += u64::from(matches!(operator, Operator::Loop { .. }));
                    depth += 1;
                    shape.depth = shape.depth.max(depth);
                }
                Operator::End => depth = depth.saturating_sub(1),
                _ => {}
            }
        }
        Ok(shape)
    }

    /// As measured: a loop weighs as much as six blocks, and a local as a hundred.
    fn work(&self) -> u64 {
        let blocks = self.blocks + 5 * self.loops;
        blocks.saturating_mul(blocks + 100 * self.locals)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An unsigned number as Wasm has it.
    fn number(mut n: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while n >= 0x80 {
            bytes.push(n as u8 | 0x80);
            n >>= 7;
        }
        bytes.push(n as u8);
        bytes
    }

    fn section(id: u8, content: &[u8]) -> Vec<u8> {
        [&[id][..], &number(content.len()), content].concat()
    }

    /// A module of `functions` functions with that body.
    fn module(functions: usize, body: &[u8]) -> Vec<u8> {
        let body = [&[0][..], body, &[0x0b]].concat();
        let body = [number(body.len()), body].concat();
        let types = section(1, &[1, 0x60, 0, 0]);
        let declared = section(3, &[number(functions), vec![0; functions]].concat());
        let code = section(10, &[number(functions), body.repeat(functions)].concat());
        [b"\0asm\x01\0\0\0".to_vec(), types, declared, code].concat()
    }

    fn component(parts: &[(u8, &[u8])]) -> Vec<u8> {
        let sections = parts.iter().flat_map(|(id, part)| section(*id, part));
        [b"\0asm\x0d\0\x01\0".to_vec(), sections.collect()].concat()
    }

    /// Blocks in each other.
    fn nested(blocks: usize) -> Vec<u8> {
        [[0x02, 0x40].repeat(blocks), vec![0x0b; blocks]].concat()
    }

    #[test]
    fn what_would_take_too_long_to_compile_is_not_compiled() {
        const MODULE: u8 = 1;
        const COMPONENT: u8 = 4;
        let amount = |bytes: &[u8]| Interface::read(bytes).unwrap().check_amount();
        let check = |bytes: Vec<u8>, expected: &str| {
            let found = amount(&bytes).map_or_else(|reason| reason.to_string(), |()| "fine".to_owned());
            assert!(found.starts_with(expected), "{found}");
        };
        let half = module(FUNCTIONS_MAX as usize / 2, &[]);
        check(component(&[(MODULE, &half), (MODULE, &half)]), "fine");
        check(
            component(&[(MODULE, &half), (MODULE, &half), (MODULE, &module(1, &[]))]),
            "it has 60001 functions",
        );
        let deep = |blocks| component(&[(MODULE, &module(1, &nested(blocks)))]);
        check(deep(10_000), "fine");
        check(deep(10_001), "blocks lie 10001 deep");
        check(deep(400_000), "one of its functions has 1200002 bytes");
        let wide = |functions, loops| module(functions, &[0x03, 0x40, 0x0b].repeat(loops));
        check(component(&[(MODULE, &wide(1, 5_000))]), "fine");
        check(component(&[(MODULE, &wide(1, 8_000))]), "its functions have so many loops");
        check(component(&[(MODULE, &wide(20, 2_000))]), "its functions have so many loops");
        let empty = component(&[]);
        check(component(&vec![(COMPONENT, &*empty); 1_000]), "fine");
        check(component(&vec![(COMPONENT, &*empty); 1_001]), "1001 modules and components are in it");
        let dolls = |depth| (0..depth).fold(component(&[]), |inner, _| component(&[(COMPONENT, &inner)]));
        check(dolls(16), "fine");
        check(dolls(17), "its parts lie 17 deep");
    }
}
