import torch

from lab.checks import expect, numbers, returned, same

HINT = """
torch.cat(..., -1) of the outputs; torch.cat(..., 1) of the (V, d) weights of embeddings and heads.
block.load_state_dict(other.state_dict()) copies a block's weights. Overwrite a parameter by
parameter.copy_(values), under `with torch.no_grad():`."""
PLACES = ['papaformer.py, compose', 'papaformer.py, Share']


def two_paths(ex):
    """-> two paths (10 tokens, width 3, two blocks), and what compose makes of them"""
    paths = [ex.Path(10, 3, n_layer=2) for _ in range(2)]
    model = ex.compose(paths)
    expect(isinstance(model, ex.Composed),
           f'compose returns a {type(model).__name__}, not a Composed')
    for name in ('wte', 'head'):
        shape = tuple(getattr(model, name).weight.shape)
        expect(shape == (10, 6), f'{name}.weight has the shape {shape}, not (10, 6)')
    return paths, model


def blocks_read_x(ex):
    """ParallelLayer: all blocks read x; their outputs, side by side, go through the connection"""
    layer, x = ex.ParallelLayer(2, 3, 5), torch.randn(1, 4, 3)
    y = returned(layer(x), (1, 4, 5))
    a, b = [block(x) for block in layer.blocks]
    left, right = layer.connection.weight.split(3, 1)
    expect(same(y, a @ left.T + b @ right.T),
           'the output is not connection(a and b side by side), where a and b are what the two '
           'blocks make of the same x')


def embeddings_side_by_side(ex):
    """a token's embeddings stand side by side, in the order of the paths"""
    paths, model = two_paths(ex)
    found, (a, b) = model.wte.weight[7], [path.wte.weight[7] for path in paths]
    expect(same(found, torch.cat((a, b))),
           f'token 7 has the embedding {numbers(found)}, not {numbers(a)} and {numbers(b)} '
           'side by side')


def logits_add_up(ex):
    """of states side by side, the head makes the sum of the paths' logits"""
    paths, model = two_paths(ex)
    a, b = torch.randn(2, 3)
    expect(same(model.head(torch.cat((a, b))), paths[0].head(a) + paths[1].head(b)),
           "the head's logits are not the sum of the paths' logits: its rows are those of the "
           "paths' heads side by side, in the order of the paths")


def blocks_are_copies(ex):
    """block p of layer i computes what block i of path p does"""
    paths, model = two_paths(ex)
    x = torch.randn(4, 3)
    for i, layer in enumerate(model.layers):
        for p, block in enumerate(layer.blocks):
            equal = [f'blocks[{j}] of path {q}' for q, path in enumerate(paths)
                     for j, other in enumerate(path.blocks) if same(block(x), other(x))]
            wanted = f'blocks[{i}] of path {p}'
            found = (equal or ['no block of a path'])[0]
            expect(wanted in equal, f'layers[{i}].blocks[{p}] should compute what {wanted} does, '
                                    f'but it is like {found}')


def paths_stay(ex):
    """changing the composed model leaves the paths alone"""
    paths, model = two_paths(ex)
    weights = [p for path in paths for p in path.parameters()]
    before = [p.detach().clone() for p in weights]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    expect(all(map(torch.equal, before, weights)),
           'a path changes when the composed model is trained: they share tensors. Copy the values')


def everything_trains(ex):
    """every parameter of the composed model gets a gradient, and no parameter of a path"""
    paths, model = two_paths(ex)
    logits = returned(model(torch.arange(10)[None]), (1, 10, 10))
    logits.square().sum().backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None]
    expect(not idle, f'no gradient reaches {idle[:1]} ({len(idle)} in all): '
                     'copy values into the parameters that are there')
    reached = [name for path in paths for name, p in path.named_parameters() if p.grad is not None]
    expect(not reached, f'gradients reach {reached[:1]} of a path ({len(reached)} in all): '
                        'copy the values alone')


CHECKS = [blocks_read_x, embeddings_side_by_side, logits_add_up, blocks_are_copies, paths_stay,
          everything_trains]
