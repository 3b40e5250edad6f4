"""Race detector."""


class Races:
    def __init__(self, machine) -> None:
        raise NotImplementedError
