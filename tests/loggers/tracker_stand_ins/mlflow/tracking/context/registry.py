def resolve_tags(tags=None, ignore=None):
    return dict(tags or {})
